"""`varve produce` and `varve consume`: write and read records as text, over the Kafka protocol."""

import json
import sys
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import click

from admin.command import TOPICS_HINT, fail, with_command_config
from admin.kafka.client import (
    REQUEST_SECONDS,
    bootstrap_option,
    error_text,
    librdkafka,
    reader_settings,
)
from admin.kafka.positions import POSITION_HELP, TopicPosition, position
from admin.kafka.topics import one_partition_option, partition_numbers
from admin.rangeless_option import RangelessOption
from admin.record_text import record_fields, shown
from admin.tables import local_time
from admin.watch import interrupts
from config import exit_codes
from config.printable import printable
from config.topics.names import RESERVED_SUFFIX

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, Message

LINE_BYTES_MAX: Final = 64 << 20
POLL_SECONDS: Final = 0.5
IDLE_POLLS_MAX: Final = 60  # without a record, before the broker counts as unreachable
FAILURES_SHOWN: Final = 5


@click.command(short_help="Write lines of standard input as records.")
@click.argument("topic")
@click.option(
    "--separator",
    default="\t",
    show_default="a tab",
    help="Text between key and value. If empty, the whole line is the value.",
)
@click.option(
    "--tombstone",
    metavar="TEXT",
    help="Value that deletes its key: it is written as null.",
)
@click.option("--partition", cls=RangelessOption, type=click.IntRange(min=0), metavar="N",
              help="Write to this partition; default: chosen by the key.")  # fmt: skip
@click.option(
    "--compression",
    type=click.Choice(("none", "gzip", "snappy", "lz4", "zstd")),
    default="none",
    show_default=True,
    help="Compress the batches of records.",
)
@bootstrap_option
@with_command_config
def produce(
    topic: str,
    *,
    separator: str,
    tombstone: str | None,
    partition: int | None,
    compression: str,
    bootstrap: str,
) -> None:
    """Write each line of standard input to TOPIC: a key, the separator, a value. For example:

    printf 'device-1\\ton\\n' | varve produce devices

    If the connection breaks, the command sends unacknowledged records again, some perhaps twice.
    """
    from confluent_kafka import Producer
    from confluent_kafka.admin import AdminClient

    lines = sys.stdin.buffer
    if sys.stdin.isatty():
        click.echo("Write one record a line; Ctrl-D ends.", err=True)
    needs = f"WRITE on topic:{topic}"
    null = None if tombstone is None else tombstone.encode()
    failures: list[str] = []
    written, invalid = 0, ""

    def note(error: "KafkaError | None", message: "Message") -> None:
        nonlocal written
        if error is None:
            written += 1
        else:
            failures.append(_refusal(error, message.key(), topic, needs))

    with librdkafka(bootstrap, needs=needs) as settings:
        admin = AdminClient(settings)
        hint = f"{TOPICS_HINT}, `varve topics create` makes a new one"
        # Ends the process if they do not exist.
        partition_numbers(admin, topic, partition, hint=hint)
        client = Producer(
            settings
            | {
                # An idempotent producer needs more permissions, and confluent-kafka loses some of
                # its fatal errors. One request at a time keeps the order.
                "acks": "all",
                "max.in.flight.requests.per.connection": 1,
                "compression.type": compression,
                "linger.ms": 20,
                "message.max.bytes": 1_000_000_000,  # the broker's limit decides
                "message.timeout.ms": int(REQUEST_SECONDS * 1000),
            }
        )
        try:
            for key, value in _pairs(lines, separator.encode()):
                while True:
                    try:
                        client.produce(
                            topic,
                            None if value == null else value,
                            key,
                            on_delivery=note,
                            partition=-1 if partition is None else partition,
                        )
                        break
                    except BufferError:
                        client.poll(POLL_SECONDS)
                client.poll(0)
                if failures:
                    break
        except ValueError as error:
            invalid = str(error)
        finally:
            client.flush()
    noun = "record" if written == 1 else "records"
    click.echo(f"{written:,} {noun} written to {printable(topic)}.", err=True)
    if failures:
        more = len(failures) - FAILURES_SHOWN
        listed = failures[:FAILURES_SHOWN] + ([f"and {more} more"] if more > 0 else [])
        fail("the broker refused records:\n" + "\n".join(listed))
    if invalid:
        fail(invalid, exit_codes.USAGE)


def _refusal(error: "KafkaError", key: bytes | None, topic: str, needs: str) -> str:
    """Say why the broker refused a record, and what helps."""
    from confluent_kafka import KafkaError

    is_view = topic.endswith(RESERVED_SUFFIX)
    # No ACL permits writing to a view.
    text = f"key {shown(key, 'key')}: {error_text(error, '' if is_view else needs)}"
    if error.code() == KafkaError.INVALID_RECORD and key is None:
        text += " (a compacted topic takes no records without keys)"
    if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED and is_view:
        source = topic.removesuffix(RESERVED_SUFFIX)
        text += f" (a compacted view is read-only: write to {source})"
    return text


def _pairs(lines: BinaryIO, separator: bytes) -> Iterator[tuple[bytes | None, bytes]]:
    """Yield key and value of each line. Raises ValueError for one that has no separator."""
    for number, line in enumerate(iter(lambda: lines.readline(LINE_BYTES_MAX), b""), start=1):
        if len(line) == LINE_BYTES_MAX:
            raise ValueError(f"line {number} has {LINE_BYTES_MAX} bytes or more")
        text = line.removesuffix(b"\n").removesuffix(b"\r")
        if not separator:
            yield None, text
            continue
        key, found, value = text.partition(separator)
        if not found:
            raise ValueError(
                f"line {number} has no separator between key and value; "
                "--separator names another one, --separator '' writes records without keys"
            )
        yield key, value


@click.command(short_help="Print records of a topic.")
@click.argument("topic")
@click.option(
    "--from",
    "start",
    type=position,
    default="earliest",
    show_default=True,
    metavar="POSITION",
    help=f"Where to begin: {POSITION_HELP}",
)
@one_partition_option
@click.option("--key", metavar="TEXT", help="Only records with this key, all versions in the log.")
@click.option("--max", "limit", cls=RangelessOption, type=click.IntRange(min=1), metavar="N",
              help="Maximum number of records to print.")  # fmt: skip
@click.option("--follow", is_flag=True, help="Wait for new records, until Ctrl-C.")
@click.option(
    "--uncommitted", is_flag=True, help="Include records of open and aborted transactions."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one object a line.")
@bootstrap_option
@with_command_config
def consume(
    topic: str,
    *,
    start: TopicPosition,
    partition: int | None,
    key: str | None,
    limit: int | None,
    follow: bool,
    uncommitted: bool,
    as_json: bool,
    bootstrap: str,
) -> None:
    """Print the records of TOPIC that exist when the command starts.

    Each line is one record: partition, offset, time, key and value, separated by tabs. The command
    escapes characters that would change the terminal, and cuts keys and values to 1,000 characters;
    --json prints them whole.
    """
    from confluent_kafka import Consumer, TopicPartition
    from confluent_kafka.admin import AdminClient

    line = _json_line if as_json else _text_line
    requested = None if key is None else key.encode()
    with librdkafka(bootstrap, needs=f"READ on topic:{topic}") as settings:
        admin = AdminClient(settings)
        numbers = partition_numbers(admin, topic, partition)
        first = start.resolve(admin, topic, numbers, REQUEST_SECONDS)
        ends = TopicPosition().resolve(admin, topic, numbers, REQUEST_SECONDS)
        outage = _Outage(bootstrap)
        reader = reader_settings(settings, uncommitted=uncommitted)
        client = Consumer(reader | {"error_cb": outage.note_error})
        try:
            client.assign([TopicPartition(topic, number, first[number]) for number in numbers])
            pending = {number: ends[number] for number in numbers if first[number] < ends[number]}
            messages = _read(client, outage) if follow else _read_until(client, pending)
            matching = (m for m in messages if requested is None or m.key() == requested)
            count = 0
            for message in islice(matching, limit):
                count += 1
                click.echo(line(message))
        finally:
            client.close()
    if count == 0 and not follow:
        missing = "no record" if key is None else "no record with this key"
        click.echo(printable(f"varve: {topic}: {missing} was found"), err=True)


class _Outage:
    """Tells the user once that no broker answers, and once that it is back."""

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        self._is_open = False

    def note_error(self, error: "KafkaError") -> None:
        """Take an error of the connections; librdkafka calls this within `poll`."""
        from confluent_kafka import KafkaError

        if error.code() == KafkaError._ALL_BROKERS_DOWN and not self._is_open:
            self._is_open = True
            click.echo(f"varve: {self._bootstrap} does not answer; waiting for it", err=True)

    def check(self, client: "Consumer") -> None:
        """Look whether the broker is back."""
        from confluent_kafka import KafkaException

        if not self._is_open:
            return
        try:
            client.list_topics(timeout=POLL_SECONDS)
        except KafkaException:
            return  # still away
        self._is_open = False
        click.echo(f"varve: {self._bootstrap} answers again", err=True)


def _read_until(client: "Consumer", ends: dict[int, int]) -> "Iterator[Message]":
    """Yield the records before the end offsets of partitions. Raises KafkaException."""
    from confluent_kafka import KafkaError, KafkaException

    pending, idle = set[int | None](ends), 0
    while pending:
        message = client.poll(POLL_SECONDS)
        if message is None:
            idle += 1
            if idle == IDLE_POLLS_MAX:
                fail(
                    f"the broker sent nothing for {IDLE_POLLS_MAX * POLL_SECONDS:.0f} s",
                    exit_codes.UNREACHABLE,
                )
            continue
        idle = 0
        number, offset, error = message.partition(), message.offset(), message.error()
        if error is not None:
            if error.code() == KafkaError._PARTITION_EOF:
                pending.discard(number)
            elif error.code() == KafkaError.INVALID_MSG:
                name = message.topic()
                fail(
                    f"{name}-{number}: {error_text(error)}. The log is damaged there; `varve log "
                    f"verify {name} {number}` names the damaged range"
                )
            elif error.code() != KafkaError.GROUP_AUTHORIZATION_FAILED:
                raise KafkaException(error)
            continue
        assert number is not None
        assert offset is not None
        if offset < ends[number]:
            yield message
        if offset + 1 >= ends[number]:
            pending.discard(number)


def _read(client: "Consumer", outage: _Outage) -> "Iterator[Message]":
    """Yield records until Ctrl-C, also after an outage of the broker. Raises KafkaException."""
    from confluent_kafka import KafkaError, KafkaException

    with interrupts() as interrupted:
        while not interrupted.is_set():
            message = client.poll(POLL_SECONDS)
            outage.check(client)
            if message is None:
                continue
            error = message.error()
            if error is None:
                yield message
            elif error.code() not in (
                KafkaError._PARTITION_EOF,
                KafkaError.GROUP_AUTHORIZATION_FAILED,
            ):
                raise KafkaException(error)


def _text_line(message: "Message") -> str:
    kind, at_ms = message.timestamp()
    return "\t".join(
        (
            str(message.partition()),
            str(message.offset()),
            local_time(at_ms) if kind else "-",
            shown(message.key(), "key"),
            shown(message.value(), "value"),
        )
    )


def _json_line(message: "Message") -> str:
    kind, at_ms = message.timestamp()
    headers: Any = message.headers()  # pairs; the library's type allows a dict, too
    return json.dumps(
        {
            "topic": message.topic(),
            "partition": message.partition(),
            "offset": message.offset(),
            "timestamp_ms": at_ms if kind else None,
            **record_fields(message.key(), message.value(), headers),
        }
    )
