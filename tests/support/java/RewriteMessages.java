import java.io.BufferedInputStream;
import java.io.BufferedOutputStream;
import java.io.DataInputStream;
import java.io.DataOutputStream;
import java.io.EOFException;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import org.apache.kafka.common.message.ApiMessageType;
import org.apache.kafka.common.protocol.ApiMessage;
import org.apache.kafka.common.protocol.ByteBufferAccessor;
import org.apache.kafka.common.protocol.ObjectSerializationCache;

/**
 * Reads message bodies with Kafka's own classes and writes them again. Input: API key (2 bytes),
 * version (2), whether it is a request (1), size (4), and the body. Output: whether it could be
 * read (1), size (4), and the new body or the error.
 */
public class RewriteMessages {
  public static void main(String[] args) throws Exception {
    DataInputStream input = new DataInputStream(new BufferedInputStream(System.in));
    DataOutputStream output = new DataOutputStream(new BufferedOutputStream(System.out));
    while (true) {
      short key;
      try {
        key = input.readShort();
      } catch (EOFException end) {
        return;
      }
      short version = input.readShort();
      boolean isRequest = input.readBoolean();
      byte[] body = input.readNBytes(input.readInt());
      byte[] answer;
      boolean isRead = true;
      try {
        answer = rewrite(key, version, isRequest, body);
      } catch (Exception error) {
        isRead = false;
        answer = error.toString().getBytes(StandardCharsets.UTF_8);
      }
      output.writeBoolean(isRead);
      output.writeInt(answer.length);
      output.write(answer);
      output.flush();
    }
  }

  private static byte[] rewrite(short key, short version, boolean isRequest, byte[] body) {
    ApiMessageType type = ApiMessageType.fromApiKey(key);
    ApiMessage message = isRequest ? type.newRequest() : type.newResponse();
    ByteBuffer input = ByteBuffer.wrap(body);
    message.read(new ByteBufferAccessor(input), version);
    if (input.hasRemaining()) {
      throw new IllegalArgumentException(input.remaining() + " bytes were not read");
    }
    ObjectSerializationCache cache = new ObjectSerializationCache();
    ByteBuffer output = ByteBuffer.allocate(message.size(cache, version));
    message.write(new ByteBufferAccessor(output), cache, version);
    return output.array();
  }
}
