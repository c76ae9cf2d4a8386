import java.io.FileReader;
import java.util.Properties;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.*;
import org.apache.kafka.streams.kstream.*;
import org.apache.kafka.streams.state.Stores;

/**
 * A Kafka Streams application with exactly_once_v2: counts records by key. FILE APPLICATION SOURCE
 * SINK FOLDER [RECORDS]. After RECORDS records it halts as if it were killed; without RECORDS it
 * stops cleanly when its standard input ends.
 */
public class CountByKey {
  public static void main(String[] args) throws Exception {
    Properties settings = new Properties();
    try (FileReader reader = new FileReader(args[0])) {
      settings.load(reader);
    }
    settings.put("application.id", args[1]);
    settings.put("processing.guarantee", "exactly_once_v2");
    settings.put("state.dir", args[4]);
    settings.put("commit.interval.ms", "100");
    settings.put("replication.factor", "1");
    settings.put("session.timeout.ms", "6000"); // how long the group waits for a killed member
    settings.put("heartbeat.interval.ms", "1000");
    settings.put("default.key.serde", Serdes.StringSerde.class.getName());
    settings.put("default.value.serde", Serdes.StringSerde.class.getName());
    int records = args.length > 5 ? Integer.parseInt(args[5]) : Integer.MAX_VALUE;
    AtomicInteger seen = new AtomicInteger();
    CountDownLatch enough = new CountDownLatch(1);
    StreamsBuilder builder = new StreamsBuilder();
    builder.<String, String>stream(args[2])
        .peek((key, value) -> {
          if (seen.incrementAndGet() == records) enough.countDown();
        })
        .groupByKey()
        .count(Materialized.as(Stores.inMemoryKeyValueStore("counts")))
        .toStream()
        .mapValues(count -> Long.toString(count))
        .to(args[3]);
    KafkaStreams streams = new KafkaStreams(builder.build(), settings);
    streams.setUncaughtExceptionHandler(error -> {
      error.printStackTrace();
      Runtime.getRuntime().halt(2);
      return null;
    });
    streams.start();
    if (args.length > 5) {
      if (!enough.await(100, TimeUnit.SECONDS)) Runtime.getRuntime().halt(3);
    } else {
      while (System.in.read() >= 0) {}
      streams.close();
    }
    System.out.println("counted " + seen.get());
    System.out.flush();
    Runtime.getRuntime().halt(0);
  }
}
