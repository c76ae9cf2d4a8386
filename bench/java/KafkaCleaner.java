import java.io.BufferedReader;
import java.io.File;
import java.io.InputStreamReader;
import java.util.Map;
import java.util.Optional;

import org.apache.kafka.common.config.TopicConfig;
import org.apache.kafka.common.utils.Time;
import org.apache.kafka.server.util.KafkaScheduler;
import org.apache.kafka.storage.internals.log.Cleaner;
import org.apache.kafka.storage.internals.log.CleanerStats;
import org.apache.kafka.storage.internals.log.LogConfig;
import org.apache.kafka.storage.internals.log.LogDirFailureChannel;
import org.apache.kafka.storage.internals.log.LogToClean;
import org.apache.kafka.storage.internals.log.ProducerStateManagerConfig;
import org.apache.kafka.storage.internals.log.SkimpyOffsetMap;
import org.apache.kafka.storage.internals.log.UnifiedLog;
import org.apache.kafka.storage.internals.utils.Throttler;
import org.apache.kafka.storage.log.metrics.BrokerTopicStats;

/**
 * Apache Kafka's own cleaner, one thread, for bench/cleaner.py: each line of input has
 * the first dirty offset and the folder of a partition, each line of output the figures of a clean. Sizes are those that a broker with one cleaner thread and
 * default settings hands to it (LogCleaner.CleanerThread); the throttle is open.
 */
public class KafkaCleaner {
    static final int MAP_BYTES = 128 << 20;
    static final int IO_BUFFER_BYTES = (512 << 10) / 2;
    static final int BATCH_BYTES_MAX = 1 << 20;
    static final double LOAD_FACTOR = 0.9;

    public static void main(String[] arguments) throws Exception {
        KafkaScheduler scheduler = new KafkaScheduler(1);
        scheduler.startup();
        Throttler throttler = new Throttler(Double.MAX_VALUE, 300, "cleaner-io", "bytes", Time.SYSTEM);
        Cleaner cleaner = new Cleaner(0, new SkimpyOffsetMap(MAP_BYTES), IO_BUFFER_BYTES, BATCH_BYTES_MAX,
            LOAD_FACTOR, throttler, Time.SYSTEM, partition -> { });
        LogConfig config = new LogConfig(Map.of(TopicConfig.CLEANUP_POLICY_CONFIG, "compact",
            TopicConfig.SEGMENT_BYTES_CONFIG, arguments[0]));
        BufferedReader input = new BufferedReader(new InputStreamReader(System.in));
        for (String line = input.readLine(); line != null; line = input.readLine()) {
            int space = line.indexOf(' ');
            long firstDirty = Long.parseLong(line.substring(0, space));
            String folder = line.substring(space + 1);
            UnifiedLog log = UnifiedLog.create(new File(folder), config, 0L, Long.MAX_VALUE, scheduler,
                new BrokerTopicStats(), Time.SYSTEM, 900_000, new ProducerStateManagerConfig(86_400_000, false),
                600_000, new LogDirFailureChannel(1), true, Optional.empty());
            log.updateHighWatermark(log.logEndOffset());
            long end = log.activeSegment().baseOffset();
            long started = System.nanoTime();
            CleanerStats stats = cleaner.clean(new LogToClean(log, firstDirty, end, true)).getValue();
            double seconds = (System.nanoTime() - started) / 1e9;
            log.close();
            System.out.printf("cleaned %.6f %d %d %d %d %d%n", seconds, end, stats.messagesRead(), stats.messagesWritten(),
                stats.bytesRead(), stats.bytesWritten());
        }
        scheduler.shutdown();
    }
}
