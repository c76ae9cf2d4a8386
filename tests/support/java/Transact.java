import java.time.Duration;
import java.util.*;
import org.apache.kafka.clients.admin.*;
import org.apache.kafka.clients.consumer.*;
import org.apache.kafka.clients.producer.*;
import org.apache.kafka.common.*;
import org.apache.kafka.common.serialization.*;

/**
 * Reads one topic and writes another in transactions: the offsets commit with the records. Arguments:
 * bootstrap, source, sink, group, records of a transaction, records to read in all.
 */
public class Transact {
  public static void main(String[] args) throws Exception {
    String source = args[1], sink = args[2], group = args[3];
    int size = Integer.parseInt(args[4]), total = Integer.parseInt(args[5]);
    Map<String, Object> common = Map.of("bootstrap.servers", args[0]);
    Map<String, Object> consumerSettings = new HashMap<>(common);
    consumerSettings.put("group.id", group);
    consumerSettings.put("isolation.level", "read_committed");
    consumerSettings.put("auto.offset.reset", "earliest");
    consumerSettings.put("enable.auto.commit", "false");
    consumerSettings.put("max.poll.records", Integer.toString(size));
    Map<String, Object> producerSettings = new HashMap<>(common);
    producerSettings.put("transactional.id", "loop-" + group);
    int seen = 0, transactions = 0;
    try (var consumer = new KafkaConsumer<>(
            consumerSettings, new StringDeserializer(), new StringDeserializer());
         var producer = new KafkaProducer<>(
             producerSettings, new StringSerializer(), new StringSerializer())) {
      producer.initTransactions();
      consumer.subscribe(List.of(source));
      while (seen < total) {
        var records = consumer.poll(Duration.ofMillis(500));
        if (records.isEmpty()) continue;
        boolean aborts = transactions % 5 == 4;
        producer.beginTransaction();
        for (var record : records) {
          producer.send(new ProducerRecord<>(sink, record.key(), "out-" + record.value()));
        }
        Map<TopicPartition, OffsetAndMetadata> offsets = new HashMap<>();
        for (var partition : records.partitions()) {
          offsets.put(partition, new OffsetAndMetadata(consumer.position(partition)));
        }
        producer.sendOffsetsToTransaction(offsets, consumer.groupMetadata());
        transactions++;
        if (aborts) {
          producer.abortTransaction();
          for (var partition : records.partitions()) {
            consumer.seek(partition, records.records(partition).get(0).offset());
          }
        } else {
          producer.commitTransaction();
          seen += records.count();
        }
      }
    }
    System.out.println("read " + seen);
  }
}
