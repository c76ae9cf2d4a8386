import java.io.File;
import java.io.PrintWriter;
import java.lang.reflect.Method;
import java.lang.reflect.Proxy;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Comparator;
import java.util.HexFormat;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Properties;
import java.util.TreeMap;
import java.util.concurrent.ScheduledFuture;
import java.util.function.Supplier;
import java.util.stream.Stream;

import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.record.internal.CompressionType;
import org.apache.kafka.common.record.internal.DefaultRecordBatch;
import org.apache.kafka.common.record.internal.MemoryRecords;
import org.apache.kafka.common.record.internal.MutableRecordBatch;
import org.apache.kafka.common.record.internal.Record;
import org.apache.kafka.common.utils.Time;
import org.apache.kafka.server.util.Scheduler;
import org.apache.kafka.storage.internals.log.AbortedTxn;
import org.apache.kafka.storage.internals.log.Cleaner;
import org.apache.kafka.storage.internals.log.LogCleanerManager;
import org.apache.kafka.storage.internals.log.LogConfig;
import org.apache.kafka.storage.internals.log.LogDirFailureChannel;
import org.apache.kafka.storage.internals.log.LogSegment;
import org.apache.kafka.storage.internals.log.LogStartOffsetIncrementReason;
import org.apache.kafka.storage.internals.log.LogToClean;
import org.apache.kafka.storage.internals.log.ProducerStateManagerConfig;
import org.apache.kafka.storage.internals.log.SkimpyOffsetMap;
import org.apache.kafka.storage.internals.log.UnifiedLog;
import org.apache.kafka.storage.internals.utils.Throttler;
import org.apache.kafka.storage.log.metrics.BrokerTopicStats;

/**
 * Apache Kafka's own log and cleaner, driven by a script and a clock that stands still: see
 * tests/compare/kafka_side.py, which writes the scripts and reads what is printed here.
 */
public class KafkaCleaner {
    static final int PRODUCER_EXPIRATION_MS = 86_400_000;

    final Path folder;
    final Path printed;
    final List<Path> others;
    final Properties properties = new Properties();
    final StillClock clock = new StillClock();
    final LogDirFailureChannel failures = new LogDirFailureChannel(1);
    UnifiedLog log;
    Optional<Long> checkpoint = Optional.empty();
    int dumps = 0;

    KafkaCleaner(Path home) throws Exception {
        folder = Files.createDirectories(home.resolve("kafka-data").resolve("topic-0"));
        printed = Files.createDirectories(home.resolve("kafka"));
        others = Stream.of("varve", "varve-own", "varve-selective").map(home::resolve).toList();
    }

    /** Every folder in the given one that holds a script is a case. */
    public static void main(String[] arguments) throws Exception {
        List<Path> homes = new ArrayList<>();
        try (Stream<Path> found = Files.list(Path.of(arguments[0]))) {
            found.filter(path -> Files.exists(path.resolve("script"))).sorted().forEach(homes::add);
        }
        for (Path home : homes) {
            KafkaCleaner one = new KafkaCleaner(home);
            try {
                for (String line : Files.readAllLines(home.resolve("script"))) {
                    one.execute(line.split(" "));
                }
            } catch (Exception error) {
                error.printStackTrace();
                Files.writeString(one.printed.resolve("failed"), error.toString());
            }
            one.remove();
        }
    }

    void execute(String[] words) throws Exception {
        switch (words[0]) {
            case "config" -> configure(words);
            case "now" -> clock.nowMs = Long.parseLong(words[1]);
            case "append" -> append(Integer.parseInt(words[1]), HexFormat.of().parseHex(words[2]));
            case "roll" -> touch(log.roll(Optional.of(Long.parseLong(words[1]))));
            case "delete-records" -> log.maybeIncrementLogStartOffset(Long.parseLong(words[1]),
                LogStartOffsetIncrementReason.ClientRecordDeletion);
            case "truncate" -> truncate(Long.parseLong(words[1]));
            case "expire-producers" -> log.removeExpiredProducers(clock.nowMs);
            case "retain" -> {
                log.deleteOldSegments();
                touch(log.activeSegment());
            }
            case "reopen" -> {
                log.close();
                log = open(words[1].equals("clean"));
                log.updateHighWatermark(log.logEndOffset());
            }
            case "clean" -> clean(Integer.parseInt(words[1]), Integer.parseInt(words[2]));
            case "dump" -> dump();
            default -> throw new IllegalArgumentException(words[0]);
        }
    }

    void configure(String[] words) throws Exception {
        for (int index = 1; index < words.length; index++) {
            String[] pair = words[index].split("=", 2);
            properties.setProperty(pair[0], pair[1]);
        }
        if (log == null) {
            log = open(true);
        } else {
            log.updateConfig(new LogConfig(properties));
        }
    }

    UnifiedLog open(boolean wasClean) throws Exception {
        return UnifiedLog.create(folder.toFile(), new LogConfig(properties), Math.max(logStart(), 0L), 0L, new Nobody(),
            new BrokerTopicStats(), clock, 3_600_000, new ProducerStateManagerConfig(PRODUCER_EXPIRATION_MS, false),
            600_000, failures, wasClean, Optional.empty());
    }

    long logStart() {
        return log == null ? 0L : log.logStartOffset();
    }

    void append(int epoch, byte[] batch) throws Exception {
        log.appendAsFollower(MemoryRecords.readableRecords(ByteBuffer.wrap(batch)), epoch);
        log.updateHighWatermark(log.logEndOffset());
        touch(log.activeSegment());
    }

    /** The file's own time counts where a segment has no timestamps. */
    void touch(LogSegment segment) {
        if (!segment.log().file().setLastModified(clock.nowMs)) {
            throw new IllegalStateException("no time for " + segment);
        }
    }

    void truncate(long offset) throws Exception {
        log.truncateTo(offset);
        log.updateHighWatermark(log.logEndOffset());
        checkpoint = checkpoint.map(old -> Math.min(old, log.activeSegment().baseOffset()));
    }

    // LogCleaner's own steps for one log: what is cleanable, the clean, the checkpoint.

    void clean(int slots, int bufferBytes) throws Exception {
        Method method = LogCleanerManager.class.getDeclaredMethod("cleanableOffsets", UnifiedLog.class, Optional.class,
            long.class);
        method.setAccessible(true);
        Object offsets = method.invoke(null, log, checkpoint, clock.nowMs);
        LogToClean cleanable = new LogToClean(log, field(offsets, "firstDirtyOffset"),
            field(offsets, "firstUncleanableDirtyOffset"), false);
        if (cleanable.cleanableBytes() == 0) {
            return;
        }
        Throttler throttler = new Throttler(Double.MAX_VALUE, 300, "cleaner-io", "bytes", clock);
        Cleaner cleaner = new Cleaner(0, new SkimpyOffsetMap(slots * 24), bufferBytes, 1 << 22, 0.9, throttler, clock,
            partition -> { });
        checkpoint = Optional.of(cleaner.doClean(cleanable, clock.nowMs).getKey());
    }

    static long field(Object record, String name) throws Exception {
        Method method = record.getClass().getDeclaredMethod(name);
        method.setAccessible(true);
        return (Long) method.invoke(record);
    }

    // What is left, ours and theirs, in the same words

    void dump() throws Exception {
        String name = String.format("%02d", dumps++);
        try (PrintWriter out = writer(printed.resolve(name + ".batches"))) {
            for (LogSegment segment : log.logSegments()) {
                print(out, Files.readAllBytes(segment.log().file().toPath()));
            }
        }
        try (PrintWriter out = writer(printed.resolve(name + ".state"))) {
            printState(out);
        }
        for (Path other : others) {
            if (Files.exists(other.resolve(name + ".log"))) {
                try (PrintWriter out = writer(other.resolve(name + ".batches"))) {
                    print(out, Files.readAllBytes(other.resolve(name + ".log")));
                }
            }
        }
    }

    static PrintWriter writer(Path path) throws Exception {
        return new PrintWriter(Files.newBufferedWriter(path, StandardCharsets.UTF_8));
    }

    static void print(PrintWriter out, byte[] content) {
        for (MutableRecordBatch any : MemoryRecords.readableRecords(ByteBuffer.wrap(content)).batches()) {
            DefaultRecordBatch batch = (DefaultRecordBatch) any;
            batch.ensureValid();
            out.printf("batch %d %d leader=%d codec=%s %s txn=%b control=%b horizon=%d base=%d max=%d producer=%d/%d "
                    + "sequence=%d count=%d crc=%s%n", batch.baseOffset(), batch.lastOffset(),
                batch.partitionLeaderEpoch(), batch.compressionType().name, batch.timestampType().name,
                batch.isTransactional(), batch.isControlBatch(), batch.deleteHorizonMs().orElse(-1L),
                batch.baseTimestamp(), batch.maxTimestamp(), batch.producerId(), batch.producerEpoch(),
                batch.baseSequence(), batch.countOrNull(),
                batch.compressionType() == CompressionType.NONE ? Long.toHexString(batch.checksum()) : "-");
            for (Record record : batch) {
                out.printf("record %d %d %s %s", record.offset(), record.timestamp(), hex(record.key()),
                    hex(record.value()));
                for (Header header : record.headers()) {
                    ByteBuffer value = header.value() == null ? null : ByteBuffer.wrap(header.value());
                    out.printf(" %s=%s", hex(ByteBuffer.wrap(header.key().getBytes(StandardCharsets.UTF_8))), hex(value));
                }
                out.println();
            }
        }
    }

    static String hex(ByteBuffer buffer) {
        if (buffer == null) {
            return "null";
        }
        byte[] content = new byte[buffer.remaining()];
        buffer.duplicate().get(content);
        return "x" + HexFormat.of().formatHex(content);
    }

    void printState(PrintWriter out) {
        out.printf("start %d%n", log.logStartOffset());
        out.printf("end %d%n", log.logEndOffset());
        out.printf("stable %d%n", log.lastStableOffset());
        out.printf("dirty %d%n", checkpoint.orElse(-1L));
        for (LogSegment segment : log.logSegments()) {
            out.printf("segment %d %d%n", segment.baseOffset(), segment.size());
        }
        List<AbortedTxn> aborted = new ArrayList<>();
        for (LogSegment segment : log.logSegments()) {
            aborted.addAll(segment.txnIndex().allAbortedTxns());
        }
        for (AbortedTxn one : aborted) {
            out.printf("aborted %d %d %d %d%n", one.producerId(), one.firstOffset(), one.lastOffset(),
                one.lastStableOffset());
        }
        Map<Long, Long> offsets = new TreeMap<>();
        log.producerStateManager().activeProducers().forEach((id, entry) -> offsets.put(id, entry.lastDataOffset()));
        log.activeProducers().stream().sorted(Comparator.comparingLong(one -> one.producerId())).forEach(one ->
            out.printf("producer %d epoch=%d sequence=%d offset=%d open=%d coordinator=%d%n", one.producerId(),
                one.producerEpoch(), one.lastSequence(), offsets.get(one.producerId()), one.currentTxnStartOffset(),
                one.coordinatorEpoch()));
    }

    void remove() throws Exception {
        if (log != null) {
            log.close();
        }
        try (Stream<Path> all = Files.walk(folder)) {
            all.sorted(Comparator.reverseOrder()).map(Path::toFile).forEach(File::delete);
        }
    }

    /** A clock that stands where it is put. */
    static class StillClock implements Time {
        long nowMs;

        public long milliseconds() {
            return nowMs;
        }

        public long nanoseconds() {
            return nowMs * 1_000_000;
        }

        public void sleep(long ms) {
            throw new IllegalStateException("nothing sleeps here");
        }

        public void waitObject(Object object, Supplier<Boolean> condition, long deadlineMs) {
            throw new IllegalStateException("nothing waits here");
        }
    }

    /** Does nothing later: files marked as deleted go with the folder. */
    static class Nobody implements Scheduler {
        public void startup() { }

        public void shutdown() { }

        public ScheduledFuture<?> schedule(String name, Runnable task, long delayMs, long periodMs) {
            return (ScheduledFuture<?>) Proxy.newProxyInstance(KafkaCleaner.class.getClassLoader(),
                new Class<?>[] {ScheduledFuture.class}, (proxy, method, arguments) -> method.getName().equals("cancel"));
        }

        public void resizeThreadPool(int size) { }
    }
}
