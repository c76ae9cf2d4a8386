// What an application does with kafkajs. Arguments: a JSON object with `bootstrap`, `topic`, `group`
// and, for SASL_SSL, `ca` (a file), `user` and `password`. It prints one line for each step.
const fs = require("fs");
const { Kafka, logLevel } = require("kafkajs");

const options = JSON.parse(process.argv[2]);
const secure = options.ca
  ? {
      ssl: { ca: [fs.readFileSync(options.ca, "utf8")] },
      sasl: { mechanism: "scram-sha-512", username: options.user, password: options.password },
    }
  : {};
const kafka = new Kafka({
  clientId: "kafkajs", brokers: [options.bootstrap], logLevel: logLevel.ERROR, ...secure,
});

// Read as a group member until `count` records have come; a second member continues.
async function consume(count) {
  const consumer = kafka.consumer({ groupId: options.group, maxWaitTimeInMs: 200 });
  await consumer.connect();
  await consumer.subscribe({ topic: options.topic, fromBeginning: true });
  const offsets = [];
  await new Promise((resolve, reject) => {
    consumer.on(consumer.events.CRASH, (event) => reject(event.payload.error));
    consumer.run({
      autoCommit: false,
      eachMessage: async ({ message }) => {
        if (offsets.length < count) offsets.push(Number(message.offset));
        if (offsets.length === count) resolve();
      },
    });
  });
  const next = offsets[count - 1] + 1;
  await consumer.commitOffsets([{ topic: options.topic, partition: 0, offset: String(next) }]);
  await consumer.disconnect();
  return offsets;
}

async function main() {
  const admin = kafka.admin();
  await admin.connect();
  await admin.createTopics({
    topics: [{
      topic: options.topic, numPartitions: 1,
      configEntries: [{ name: "cleanup.policy", value: "compact" }],
    }],
  });
  const { topics } = await admin.fetchTopicMetadata({ topics: [options.topic] });
  const { resources } = await admin.describeConfigs({
    resources: [{ type: 2, name: options.topic, configNames: ["cleanup.policy"] }],
  });
  const policy = resources[0].configEntries[0].configValue;
  console.log(`described ${topics[0].partitions.length} ${policy}`);
  await admin.disconnect();

  const producer = kafka.producer({
    transactionalId: options.topic, idempotent: true, maxInFlightRequests: 1,
  });
  await producer.connect();
  const send = async (sender, value, compression) => sender.send({
    topic: options.topic, acks: -1, compression,
    messages: Array.from({ length: 10 }, (_, key) => ({ key: `k${key}`, value })),
  });
  for (const [value, isCommitted] of [["first", true], ["aborted", false], ["last", true]]) {
    const transaction = await producer.transaction();
    await send(transaction, value, value === "last" ? 1 : 0); // gzip
    await (isCommitted ? transaction.commit() : transaction.abort());
  }
  await producer.disconnect();
  const plain = kafka.producer();
  await plain.connect();
  await plain.send({ topic: options.topic, messages: [{ key: "k0", value: null }] });
  await plain.disconnect();

  console.log(`read ${(await consume(15)).length}`);
  console.log(`continued ${(await consume(6)).length}`);
}

main().then(() => process.exit(0), (error) => {
  console.error(error);
  process.exit(1);
});
