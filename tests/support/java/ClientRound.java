import java.io.FileReader;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.*;
import org.apache.kafka.clients.admin.*;
import org.apache.kafka.clients.consumer.*;
import org.apache.kafka.clients.producer.*;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.*;

/**
 * What an application does with a broker, through every part of Kafka's client: FILE TOPIC, the
 * first a properties file of the connection. Compiles against 2.8 and later. Prints the records that
 * the group read, and those that it read after it continued from its committed offsets.
 */
public class ClientRound {
  static final String[] CODECS = {"none", "gzip", "snappy", "lz4", "zstd"};
  static final int KEYS = 50, ROUNDS = 4;

  static Properties settings(String file, String... more) throws Exception {
    Properties settings = new Properties();
    try (FileReader reader = new FileReader(file)) {
      settings.load(reader);
    }
    for (int i = 0; i < more.length; i += 2) settings.put(more[i], more[i + 1]);
    return settings;
  }

  static byte[] bytes(String text) {
    return text.getBytes(StandardCharsets.UTF_8);
  }

  static ProducerRecord<byte[], byte[]> record(String topic, int key, String value) {
    ProducerRecord<byte[], byte[]> record =
        new ProducerRecord<>(topic, key % 2, bytes("k" + key), value == null ? null : bytes(value));
    record.headers().add("h", bytes("x"));
    return record;
  }

  static int consume(String file, String topic, int count) throws Exception {
    Properties settings =
        settings(
            file, "group.id", "group-" + topic, "auto.offset.reset", "earliest",
            "enable.auto.commit", "false", "isolation.level", "read_committed");
    int seen = 0;
    try (KafkaConsumer<byte[], byte[]> consumer =
        new KafkaConsumer<>(settings, new ByteArrayDeserializer(), new ByteArrayDeserializer())) {
      consumer.subscribe(Collections.singletonList(topic));
      long deadline = System.nanoTime() + 60_000_000_000L;
      while (seen < count && System.nanoTime() < deadline) {
        for (ConsumerRecord<byte[], byte[]> record : consumer.poll(Duration.ofMillis(200))) {
          if (!record.headers().iterator().hasNext()) throw new AssertionError("no header");
          seen++;
        }
      }
      consumer.commitSync();
    }
    return seen;
  }

  public static void main(String[] args) throws Exception {
    String file = args[0], topic = args[1];
    try (Admin admin = Admin.create(settings(file))) {
      NewTopic created = new NewTopic(topic, 2, (short) 1);
      created.configs(Collections.singletonMap("cleanup.policy", "compact"));
      admin.createTopics(Collections.singletonList(created)).all().get();
      for (String codec : CODECS) {
        Properties settings = settings(file, "compression.type", codec, "acks", "all");
        try (KafkaProducer<byte[], byte[]> producer =
            new KafkaProducer<>(settings, new ByteArraySerializer(), new ByteArraySerializer())) {
          for (int round = 0; round < ROUNDS; round++)
            for (int key = 0; key < KEYS; key++)
              producer.send(record(topic, key, codec + "-" + round));
        }
      }
      Properties settings = settings(file, "transactional.id", "id-" + topic);
      try (KafkaProducer<byte[], byte[]> producer =
          new KafkaProducer<>(settings, new ByteArraySerializer(), new ByteArraySerializer())) {
        producer.initTransactions();
        producer.beginTransaction();
        for (int key = 0; key < KEYS; key++) producer.send(record(topic, key, "aborted"));
        producer.abortTransaction();
        producer.beginTransaction();
        for (int key = 0; key < 5; key++) producer.send(record(topic, key, null));
        producer.commitTransaction();
      }
      int expected = CODECS.length * ROUNDS * KEYS + 5;
      int seen = consume(file, topic, expected);
      try (KafkaProducer<byte[], byte[]> producer =
          new KafkaProducer<>(settings(file), new ByteArraySerializer(), new ByteArraySerializer())) {
        producer.send(record(topic, 7, "last")).get();
      }
      System.out.println("read " + seen + " continued " + consume(file, topic, 1));
      List<String> groups = new ArrayList<>();
      for (ConsumerGroupListing listing : admin.listConsumerGroups().all().get())
        groups.add(listing.groupId());
      if (!groups.contains("group-" + topic)) throw new AssertionError(groups);
      Map<TopicPartition, OffsetAndMetadata> offsets =
          admin.listConsumerGroupOffsets("group-" + topic).partitionsToOffsetAndMetadata().get();
      if (offsets.size() != 2) throw new AssertionError(offsets);
    }
  }
}
