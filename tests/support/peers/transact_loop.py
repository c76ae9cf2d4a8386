"""A process that reads one topic and writes another in transactions, until it is killed.

Arguments: bootstrap, source, sink, group, number of partitions of the source. Any error ends the
process; whoever started it starts it again. So does a call that takes too long: after a restart of
the broker, send_offsets_to_transaction() may wait for ever, whatever its timeout (librdkafka 5456).
"""

import faulthandler
import sys

from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition

TIMEOUT = 20


def main(bootstrap: str, source: str, sink: str, group: str, partitions: int) -> None:
    common = {"bootstrap.servers": bootstrap, "log_level": 0}
    producer = Producer(
        {
            **common,
            "transactional.id": f"{group}-loop",
            "transaction.timeout.ms": 5000,
            "linger.ms": 0,
        }
    )
    producer.init_transactions(TIMEOUT)  # fences the process before this one
    consumer = Consumer(
        {
            **common,
            "group.id": group,
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
        }
    )
    committed = consumer.committed(
        [TopicPartition(source, index) for index in range(partitions)], TIMEOUT
    )
    for partition in committed:
        if partition.offset < 0:
            partition.offset = OFFSET_BEGINNING
    consumer.assign(committed)
    while True:
        faulthandler.dump_traceback_later(TIMEOUT + 5, exit=True)
        messages = consumer.consume(20, 0.2)
        if not messages:
            continue
        producer.begin_transaction()
        ends: dict[int, int] = {}
        for message in messages:
            assert message.error() is None, message.error()
            producer.produce(sink, message.value(), message.key())
            ends[message.partition()] = message.offset() + 1
        offsets = [TopicPartition(source, index, end) for index, end in ends.items()]
        producer.send_offsets_to_transaction(offsets, consumer.consumer_group_metadata(), TIMEOUT)
        producer.commit_transaction(TIMEOUT)


if __name__ == "__main__":
    _, bootstrap, source, sink, group, partitions = sys.argv
    main(bootstrap, source, sink, group, int(partitions))
