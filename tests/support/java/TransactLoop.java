import java.time.Duration;
import java.util.*;
import org.apache.kafka.clients.consumer.*;
import org.apache.kafka.clients.producer.*;
import org.apache.kafka.common.*;
import org.apache.kafka.common.serialization.*;

/**
 * Reads one topic and writes another in transactions, until it is killed. Arguments: bootstrap,
 * source, sink, group, number of partitions of the source. Any error ends the process; whoever
 * started it starts it again.
 */
public class TransactLoop {
  public static void main(String[] args) {
    Map<String, Object> common = Map.of("bootstrap.servers", args[0]);
    String source = args[1], sink = args[2], group = args[3];
    Map<String, Object> consuming = new HashMap<>(common);
    consuming.put("group.id", group);
    consuming.put("isolation.level", "read_committed");
    consuming.put("enable.auto.commit", "false");
    consuming.put("auto.offset.reset", "earliest");
    consuming.put("max.poll.records", "20");
    Map<String, Object> producing = new HashMap<>(common);
    producing.put("transactional.id", group + "-loop");
    producing.put("transaction.timeout.ms", "5000");
    producing.put("max.block.ms", "20000");
    try (var producer = new KafkaProducer<>(
             producing, new ByteArraySerializer(), new ByteArraySerializer());
         var consumer = new KafkaConsumer<>(
             consuming, new ByteArrayDeserializer(), new ByteArrayDeserializer())) {
      producer.initTransactions(); // fences the process before this one
      List<TopicPartition> partitions = new ArrayList<>();
      for (int number = 0; number < Integer.parseInt(args[4]); number++) {
        partitions.add(new TopicPartition(source, number));
      }
      consumer.assign(partitions); // reads from the committed offsets
      while (true) {
        var records = consumer.poll(Duration.ofMillis(200));
        if (records.isEmpty()) continue;
        producer.beginTransaction();
        for (var record : records) {
          producer.send(new ProducerRecord<>(sink, record.key(), record.value()));
        }
        Map<TopicPartition, OffsetAndMetadata> offsets = new HashMap<>();
        for (var partition : records.partitions()) {
          offsets.put(partition, new OffsetAndMetadata(consumer.position(partition)));
        }
        producer.sendOffsetsToTransaction(offsets, consumer.groupMetadata());
        producer.commitTransaction();
      }
    } catch (Exception error) {
      error.printStackTrace();
      Runtime.getRuntime().halt(1);
    }
  }
}
