import java.io.BufferedReader;
import java.io.File;
import java.lang.reflect.Method;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.HexFormat;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;

import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.Uuid;
import org.apache.kafka.common.compress.Compression;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.header.internals.RecordHeader;
import org.apache.kafka.common.record.TimestampType;
import org.apache.kafka.common.record.internal.ControlRecordType;
import org.apache.kafka.common.record.internal.DefaultRecordBatch;
import org.apache.kafka.common.record.internal.EndTransactionMarker;
import org.apache.kafka.common.record.internal.MemoryRecords;
import org.apache.kafka.common.record.internal.MemoryRecordsBuilder;
import org.apache.kafka.common.record.internal.Record;
import org.apache.kafka.common.record.internal.RecordBatch;
import org.apache.kafka.common.record.internal.SimpleRecord;
import org.apache.kafka.common.utils.ByteBufferOutputStream;
import org.apache.kafka.common.utils.Time;
import org.apache.kafka.metadata.properties.MetaProperties;
import org.apache.kafka.metadata.properties.MetaPropertiesVersion;
import org.apache.kafka.metadata.properties.PropertiesUtils;
import org.apache.kafka.storage.internals.checkpoint.LeaderEpochCheckpointFile;
import org.apache.kafka.storage.internals.checkpoint.OffsetCheckpointFile;
import org.apache.kafka.storage.internals.checkpoint.PartitionMetadataFile;
import org.apache.kafka.storage.internals.log.AbortedTxn;
import org.apache.kafka.storage.internals.log.AppendOrigin;
import org.apache.kafka.storage.internals.log.CompletedTxn;
import org.apache.kafka.storage.internals.log.EpochEntry;
import org.apache.kafka.storage.internals.log.LogDirFailureChannel;
import org.apache.kafka.storage.internals.log.ProducerAppendInfo;
import org.apache.kafka.storage.internals.log.ProducerStateEntry;
import org.apache.kafka.storage.internals.log.ProducerStateManager;
import org.apache.kafka.storage.internals.log.ProducerStateManagerConfig;
import org.apache.kafka.storage.internals.log.TransactionIndex;

/** Apache Kafka's own classes as an oracle for the file formats: see tests/support/formats.py. */
public class KafkaFormats {
    static final TopicPartition PARTITION = new TopicPartition("topic", 0);
    static final long START_MS = 1_700_000_000_000L;

    public static void main(String[] arguments) throws Exception {
        switch (arguments[0]) {
            case "write" -> write(Path.of(arguments[1]));
            case "read" -> read(Path.of(arguments[1]));
            case "producers" -> producers(Path.of(arguments[1]));
            default -> throw new IllegalArgumentException(arguments[0]);
        }
    }

    // write: one file of each format

    static void write(Path folder) throws Exception {
        for (String codec : List.of("none", "gzip", "snappy", "lz4", "zstd")) {
            put(folder, "batch-" + codec + ".bin", builder(Compression.of(codec).build(), 42L, 7L));
        }
        MemoryRecordsBuilder appendTime = new MemoryRecordsBuilder(ByteBuffer.allocate(1024),
            RecordBatch.MAGIC_VALUE_V2, Compression.NONE, TimestampType.LOG_APPEND_TIME, 5L, START_MS + 9,
            RecordBatch.NO_PRODUCER_ID, RecordBatch.NO_PRODUCER_EPOCH, RecordBatch.NO_SEQUENCE, false, false, 3, 1024);
        appendTime.append(START_MS, bytes("key"), bytes("value"));
        put(folder, "batch-log-append-time.bin", appendTime.build());
        put(folder, "batch-delete-horizon.bin", horizon());
        put(folder, "marker-abort.bin", MemoryRecords.withEndTransactionMarker(77L, START_MS, 4, 9L, (short) 2,
            new EndTransactionMarker(ControlRecordType.ABORT, 11)));
        put(folder, "marker-commit.bin", MemoryRecords.withEndTransactionMarker(78L, START_MS, 4, 9L, (short) 2,
            new EndTransactionMarker(ControlRecordType.COMMIT, 11)));
        ByteBuffer empty = ByteBuffer.allocate(DefaultRecordBatch.RECORD_BATCH_OVERHEAD);
        DefaultRecordBatch.writeEmptyHeader(empty, RecordBatch.MAGIC_VALUE_V2, 7L, (short) 1, 30, 100L, 104L, 3,
            TimestampType.CREATE_TIME, START_MS, true, false);
        empty.flip();
        put(folder, "batch-empty.bin", MemoryRecords.readableRecords(empty));
        for (byte magic : new byte[] {0, 1}) {
            put(folder, "messages-v" + magic + ".bin", MemoryRecords.withRecords(magic, Compression.NONE,
                new SimpleRecord(START_MS, bytes("old"), bytes("format"))));
        }
        writeTexts(folder);
        writeState(folder);
    }

    static MemoryRecords builder(Compression compression, long baseOffset, long producerId) {
        MemoryRecordsBuilder builder = MemoryRecords.builder(ByteBuffer.allocate(1 << 16), RecordBatch.MAGIC_VALUE_V2,
            compression, TimestampType.CREATE_TIME, baseOffset, RecordBatch.NO_TIMESTAMP, producerId, (short) 1, 30,
            false, 3);
        fill(builder, baseOffset);
        return builder.build();
    }

    static void fill(MemoryRecordsBuilder builder, long baseOffset) {
        Header[] headers = {new RecordHeader("name", bytes("text")), new RecordHeader("", null)};
        builder.appendWithOffset(baseOffset, START_MS, bytes("key"), bytes("value"), headers);
        builder.appendWithOffset(baseOffset + 1, START_MS - 5, bytes("tombstone"), null);
        builder.appendWithOffset(baseOffset + 2, START_MS + 70_000, null, bytes("no key"));
        builder.appendWithOffset(baseOffset + 3, START_MS, new byte[0], new byte[0]);
        builder.appendWithOffset(baseOffset + 4, START_MS, bytes("large"), bytes("0123456789".repeat(3000)));
    }

    static MemoryRecords horizon() {
        MemoryRecordsBuilder builder = new MemoryRecordsBuilder(new ByteBufferOutputStream(1 << 16),
            RecordBatch.MAGIC_VALUE_V2, Compression.NONE, TimestampType.CREATE_TIME, 42L, RecordBatch.NO_TIMESTAMP,
            7L, (short) 1, 30, false, false, 3, 1 << 16, START_MS + 86_400_000L);
        fill(builder, 42L);
        return builder.build();
    }

    static void writeTexts(Path folder) throws Exception {
        LogDirFailureChannel failures = new LogDirFailureChannel(1);
        Map<TopicPartition, Long> offsets = new LinkedHashMap<>();
        offsets.put(new TopicPartition("a.topic", 0), 5L);
        offsets.put(new TopicPartition("b_topic", 12), Long.MAX_VALUE);
        new OffsetCheckpointFile(file(folder, "cleaner-offset-checkpoint"), failures).write(offsets);
        new LeaderEpochCheckpointFile(file(folder, "leader-epoch-checkpoint"), failures)
            .write(List.of(new EpochEntry(0, 0L), new EpochEntry(3, 17L)));
        PartitionMetadataFile metadata = new PartitionMetadataFile(file(folder, "partition.metadata"), failures);
        metadata.record(new Uuid(0x0001020304050607L, 0x08090a0b0c0d0e0fL));
        metadata.maybeFlush();
        MetaProperties properties = new MetaProperties.Builder().setVersion(MetaPropertiesVersion.V1)
            .setClusterId("MkU3OEVBNTcwNTJENDM2Qg").setNodeId(4)
            .setDirectoryId(new Uuid(0x0001020304050607L, 0x08090a0b0c0d0e0fL)).build();
        PropertiesUtils.writePropertiesFile(properties.toProperties(), folder.resolve("meta.properties").toString(), true);
    }

    static void writeState(Path folder) throws Exception {
        TransactionIndex index = new TransactionIndex(0L, file(folder, "00000000000000000000.txnindex"));
        index.append(new AbortedTxn(1L, 0L, 29L, 8L));
        index.append(new AbortedTxn(2L, 8L, 74L, 36L));
        index.flush();
        index.close();
        ProducerStateManager manager = manager(folder);
        apply(manager, batch(5L, (short) 0, 0, 3, 10L, false), AppendOrigin.CLIENT);
        apply(manager, batch(6L, (short) 3, 8, 2, 14L, true), AppendOrigin.CLIENT);
        manager.updateMapEndOffset(16L);
        manager.takeSnapshot();
    }

    // read: what Kafka makes of our batches, one line per batch and record

    static void read(Path file) throws Exception {
        MemoryRecords records = MemoryRecords.readableRecords(ByteBuffer.wrap(Files.readAllBytes(file)));
        for (RecordBatch batch : records.batches()) {
            batch.ensureValid();
            System.out.printf("batch %d %d %d %d %d %d %s %s %b %b %d %d%n", batch.baseOffset(), batch.lastOffset(),
                batch.maxTimestamp(), batch.producerId(), batch.producerEpoch(), batch.baseSequence(),
                batch.compressionType().name, batch.timestampType().name, batch.isTransactional(),
                batch.isControlBatch(), batch.partitionLeaderEpoch(), batch.deleteHorizonMs().orElse(-1L));
            for (Record record : batch) {
                StringBuilder line = new StringBuilder("record " + record.offset() + " " + record.timestamp());
                line.append(" ").append(hex(record.key())).append(" ").append(hex(record.value()));
                for (Header header : record.headers()) {
                    byte[] value = header.value();
                    line.append(" ").append(hex(ByteBuffer.wrap(bytes(header.key())))).append("=")
                        .append(hex(value == null ? null : ByteBuffer.wrap(value)));
                }
                System.out.println(line);
            }
        }
    }

    static String hex(ByteBuffer buffer) {
        if (buffer == null) {
            return "null";
        }
        byte[] copy = new byte[buffer.remaining()];
        buffer.duplicate().get(copy);
        return "x" + HexFormat.of().formatHex(copy);
    }

    // producers: histories of producers, one step per line, a blank line between histories
    //   data <id> <epoch> <first sequence> <records> <transactional>
    //   end <id> <epoch> <coordinator epoch> <commit|abort>

    static void producers(Path script) throws Exception {
        Path folder = Files.createTempDirectory("producers");
        ProducerStateManager manager = manager(folder);
        long offset = 0L;
        try (BufferedReader reader = Files.newBufferedReader(script)) {
            for (String line = reader.readLine(); line != null; line = reader.readLine()) {
                if (line.isEmpty()) {
                    manager = manager(folder);
                    offset = 0L;
                    System.out.println();
                    continue;
                }
                offset = step(manager, line.split(" "), offset);
            }
        }
        Files.delete(folder);
    }

    static long step(ProducerStateManager manager, String[] words, long offset) throws Exception {
        long id = Long.parseLong(words[1]);
        short epoch = Short.parseShort(words[2]);
        RecordBatch batch;
        int count = 1;
        if (words[0].equals("data")) {
            count = Integer.parseInt(words[4]);
            batch = batch(id, epoch, Integer.parseInt(words[3]), count, offset, Boolean.parseBoolean(words[5]));
            Optional<String> known = known(manager, id, batch);
            if (known.isPresent()) {
                return say(manager, "duplicate " + known.get(), offset);
            }
        } else {
            ControlRecordType type = words[4].equals("abort") ? ControlRecordType.ABORT : ControlRecordType.COMMIT;
            batch = MemoryRecords.withEndTransactionMarker(offset, START_MS + offset, 0, id, epoch,
                new EndTransactionMarker(type, Integer.parseInt(words[3]))).batches().iterator().next();
        }
        boolean isMarker = batch.isControlBatch();
        try {
            String added = apply(manager, batch, isMarker ? AppendOrigin.REPLICATION : AppendOrigin.CLIENT);
            return say(manager, "appended" + added, offset + count);
        } catch (RuntimeException error) {
            return say(manager, error.getClass().getSimpleName(), offset);
        }
    }

    static long say(ProducerStateManager manager, String what, long offset) {
        System.out.println(what + " undecided " + manager.firstUndecidedOffset().orElse(-1L));
        return offset;
    }

    static Optional<String> known(ProducerStateManager manager, long id, RecordBatch batch) throws Exception {
        Optional<ProducerStateEntry> entry = manager.lastEntry(id);
        if (entry.isEmpty()) {
            return Optional.empty();
        }
        Method find = ProducerStateEntry.class.getDeclaredMethod("findDuplicateBatch", RecordBatch.class);
        find.setAccessible(true);
        Optional<?> found = (Optional<?>) find.invoke(entry.get(), batch);
        return found.map(one -> {
            var known = (org.apache.kafka.storage.internals.log.BatchMetadata) one;
            return known.firstOffset() + " " + known.lastOffset();
        });
    }

    static String apply(ProducerStateManager manager, RecordBatch batch, AppendOrigin origin) {
        ProducerAppendInfo info = manager.prepareUpdate(batch.producerId(), origin);
        Optional<CompletedTxn> completed = info.append(batch, Optional.empty());
        manager.update(info);
        String added = "";
        if (completed.isPresent()) {
            CompletedTxn transaction = completed.get();
            long stable = manager.lastStableOffset(transaction);
            if (transaction.isAborted()) {
                added = " aborted " + transaction.producerId() + " " + transaction.firstOffset() + " "
                    + transaction.lastOffset() + " " + stable;
            }
            manager.completeTxn(transaction);
        }
        return added;
    }

    static RecordBatch batch(long id, short epoch, int sequence, int count, long offset, boolean transactional) {
        SimpleRecord[] records = new SimpleRecord[count];
        for (int index = 0; index < count; index++) {
            records[index] = new SimpleRecord(START_MS + offset + index, bytes("k"), bytes("v"));
        }
        return MemoryRecords.withRecords(RecordBatch.MAGIC_VALUE_V2, offset, Compression.NONE,
            TimestampType.CREATE_TIME, id, epoch, sequence, 0, transactional, records).batches().iterator().next();
    }

    static ProducerStateManager manager(Path folder) throws Exception {
        return new ProducerStateManager(PARTITION, folder.toFile(), 60_000,
            new ProducerStateManagerConfig(86_400_000, false), Time.SYSTEM);
    }

    static void put(Path folder, String name, MemoryRecords records) throws Exception {
        byte[] content = new byte[records.sizeInBytes()];
        records.buffer().duplicate().get(content);
        Files.write(folder.resolve(name), content);
    }

    static File file(Path folder, String name) {
        return folder.resolve(name).toFile();
    }

    static byte[] bytes(String text) {
        return text.getBytes(StandardCharsets.UTF_8);
    }
}
