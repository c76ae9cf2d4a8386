import java.util.Properties;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/** Transactions of one producer: BOOTSTRAP TOPIC TRANSACTIONS RECORDS BYTES; prints the seconds of the second half. */
public class Transactions {
    public static void main(String[] arguments) {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", arguments[0]);
        settings.put("transactional.id", "bench-" + System.nanoTime());
        settings.put("key.serializer", ByteArraySerializer.class.getName());
        settings.put("value.serializer", ByteArraySerializer.class.getName());
        int transactions = Integer.parseInt(arguments[2]);
        int records = Integer.parseInt(arguments[3]);
        byte[] value = new byte[Integer.parseInt(arguments[4])];
        try (KafkaProducer<byte[], byte[]> producer = new KafkaProducer<>(settings)) {
            producer.initTransactions();
            long started = 0;
            for (int half = 0; half < 2; half++) { // the first half warms up the client
                started = System.nanoTime();
                for (int number = 0; number < transactions; number++) {
                    producer.beginTransaction();
                    for (int record = 0; record < records; record++) {
                        producer.send(new ProducerRecord<>(arguments[1], 0, null, value));
                    }
                    producer.commitTransaction();
                }
            }
            System.out.println((System.nanoTime() - started) / 1e9);
        }
    }
}
