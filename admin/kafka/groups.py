"""`varve groups`: list and describe consumer groups, delete them, and reset their offsets."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from admin.client import Json
from admin.command import confirm_deletion, fail, json_option, show, with_command_config
from admin.kafka.client import (
    REQUEST_SECONDS,
    bootstrap_option,
    error_text,
    hides_resources,
    librdkafka,
)
from admin.kafka.positions import POSITION_HELP, TopicPosition, position
from admin.kafka.topics import one_partition_option, partition_numbers
from admin.tables import columns
from admin.watch import watched
from config.printable import printable

if TYPE_CHECKING:
    from confluent_kafka import TopicPartition
    from confluent_kafka.admin import AdminClient


@click.group(short_help="List consumer groups, show their lag, reset their offsets.")
def groups() -> None:
    """List and describe consumer groups, delete them, and reset their offsets."""


@groups.command("list", short_help="List groups.")
@json_option
@bootstrap_option
@with_command_config
@watched
def list_groups(*, as_json: bool, bootstrap: str) -> None:
    """List consumer groups with their state and protocol."""
    from confluent_kafka.admin import AdminClient

    with librdkafka(bootstrap) as settings:
        admin = AdminClient(settings)  # its futures fail once it is gone
        answer = admin.list_consumer_groups().result(REQUEST_SECONDS)
        may_be_hidden = not answer.valid and hides_resources()
    if answer.errors:
        fail("\n".join(error_text(error.args[0]) for error in answer.errors))
    rows = [
        {"group": group.group_id, "state": group.state.name, "type": group.type.name}
        for group in sorted(answer.valid, key=lambda group: group.group_id)
    ]
    show({"groups": rows}, as_json, lambda answer: _list_lines(answer, may_be_hidden))


def _list_lines(answer: Json, may_be_hidden: bool) -> list[str]:
    rows = answer["groups"]
    if not rows:
        return [f"There are no groups{', or you may describe none' if may_be_hidden else ''}."]
    table = [("GROUP", "STATE", "PROTOCOL")]
    table += [(row["group"], row["state"].lower(), row["type"].lower()) for row in rows]
    return columns(table, right=set())


@groups.command("describe", short_help="Show a group's members and lag.")
@click.argument("group")
@json_option
@bootstrap_option
@with_command_config
@watched
def describe_group(group: str, *, as_json: bool, bootstrap: str) -> None:
    """Show the members of GROUP, its committed offsets and its lag.

    COMMITTED is the next offset that the group reads, END the offset of the next record that is
    written. LAG is the difference. In a compacted topic, fewer records may be left to read.
    """
    from confluent_kafka.admin import AdminClient

    with librdkafka(bootstrap, needs=f"DESCRIBE on group:{group}") as settings:
        admin = AdminClient(settings)
        described = _described(admin, group)
        owners = {
            (owned.topic, owned.partition): member
            for member in described.members
            for owned in (member.assignment.topic_partitions if member.assignment else ())
        }
        committed = _committed(admin, group)
        ends = _ends(admin, sorted(committed.keys() | owners.keys()))
    rows = []
    for key, end in ends.items():
        owner, offset = owners.get(key), committed.get(key)
        rows.append(
            {
                "topic": key[0],
                "partition": key[1],
                "committed_offset": offset,
                "end_offset": end,
                "lag": None if offset is None or end is None else max(0, end - offset),
                "member": None if owner is None else owner.member_id,
                "client_id": None if owner is None else owner.client_id,
                "host": None if owner is None else owner.host,
            }
        )
    answer = {
        "group": group,
        "state": described.state.name,
        "type": described.type.name,
        "members": len(described.members),
        "partitions": rows,
    }
    show(answer, as_json, _describe_lines)


def _describe_lines(answer: Json) -> list[str]:
    rows = answer["partitions"]
    noun = "member" if answer["members"] == 1 else "members"
    lag = sum(row["lag"] or 0 for row in rows)
    first = f"{answer['group']}: {answer['state'].lower()}, {answer['members']} {noun}, lag {lag}"
    if not rows:
        return [first, "It has no committed offsets."]
    table = [("PARTITION", "COMMITTED", "END", "LAG", "CLIENT", "HOST")]
    for row in rows:
        committed, end, lag, client, host = (
            "-" if row[key] is None else str(row[key])
            for key in ("committed_offset", "end_offset", "lag", "client_id", "host")
        )
        table.append((f"{row['topic']}-{row['partition']}", committed, end, lag, client, host))
    return [first, "", *columns(table, right={1, 2, 3})]


@groups.command("delete", short_help="Delete groups with their offsets.")
@click.argument("names", nargs=-1, required=True, metavar="GROUP...")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@bootstrap_option
@with_command_config
def delete_groups(names: tuple[str, ...], *, yes: bool, bootstrap: str) -> None:
    """Delete each GROUP with its committed offsets. A group with members is not deleted."""
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import AdminClient

    failures = []
    with librdkafka(bootstrap, needs=f"DESCRIBE on group:{names[0]}") as settings:
        admin = AdminClient(settings)
        for name in names:
            _described(admin, name)  # it exists
        if not yes:
            confirm_deletion(f"Delete {printable(', '.join(names))}?")
        for name, future in admin.delete_consumer_groups(list(names)).items():
            try:
                future.result(REQUEST_SECONDS)
            except KafkaException as error:
                reason = error_text(error.args[0], f"DELETE on group:{name}")
                failures.append(f"{name}: {reason}")
            else:
                click.echo(f"{printable(name)} is deleted.")
    if failures:
        fail("\n".join(failures))


@groups.command("reset-offsets", short_help="Move a group to other offsets.")
@click.argument("group")
@click.argument("topic")
@one_partition_option
@click.option(
    "--to",
    "target",
    type=position,
    required=True,
    metavar="POSITION",
    help=f"Where to move: {POSITION_HELP}",
)
@click.option("--create", is_flag=True, help="Create the group if it does not exist.")
@click.option("--dry-run", is_flag=True, help="Change nothing; show the new offsets.")
@bootstrap_option
@with_command_config
def reset_offsets(
    group: str,
    topic: str,
    *,
    partition: int | None,
    target: TopicPosition,
    create: bool,
    dry_run: bool,
    bootstrap: str,
) -> None:
    """Commit other offsets of TOPIC for GROUP. Stop its members first.

    An offset beyond the log's end, or before its start, becomes the end or the start. For example,
    to read the records since a time again:

    varve groups reset-offsets billing orders --to 2026-11-01T00:00:00Z
    """
    from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition
    from confluent_kafka.admin import AdminClient

    needs = f"READ on group:{group} and topic:{topic}"
    with librdkafka(bootstrap, needs=needs) as settings:
        admin = AdminClient(settings)
        numbers = partition_numbers(admin, topic, partition)
        before = _committed(admin, group)
        if not create and not before and _describe(admin, group).state.name == "DEAD":
            fail(f"no such group: {group}; `varve groups list` shows all, --create makes a new one")
        offsets = target.resolve(admin, topic, numbers, REQUEST_SECONDS)
        if not dry_run:
            rows = [TopicPartition(topic, number, offsets[number]) for number in numbers]
            request = ConsumerGroupTopicPartitions(group, rows)
            (future,) = admin.alter_consumer_group_offsets([request]).values()
            _check(future.result(REQUEST_SECONDS).topic_partitions)
    for number, offset in offsets.items():
        if target.offset is not None and offset != target.offset:  # as Kafka's own tool
            place = "beyond the end" if target.offset > offset else "before the start"
            text = (
                f"{topic}-{number}: offset {target.offset} is {place} of the log, {offset} is used"
            )
            click.echo(printable(f"varve: {text}"), err=True)
    table = [("PARTITION", "BEFORE", "AFTER")]
    for number in numbers:
        old = before.get((topic, number))
        table.append((f"{topic}-{number}", "-" if old is None else str(old), str(offsets[number])))
    click.echo("\n".join(map(printable, columns(table, right={1, 2}))))
    if dry_run:
        click.echo("Nothing is changed: --dry-run.")


def _describe(admin: "AdminClient", group: str) -> Any:
    """Return the ConsumerGroupDescription of a group; its state is DEAD if it does not exist."""
    (future,) = admin.describe_consumer_groups([group]).values()
    return future.result(REQUEST_SECONDS)


def _described(admin: "AdminClient", group: str) -> Any:
    """Return the ConsumerGroupDescription of a group. Ends the process if it does not exist."""
    described = _describe(admin, group)
    if described.state.name == "DEAD" and not _committed(admin, group):
        fail(f"no such group: {group}; `varve groups list` shows all")
    return described


def _committed(admin: "AdminClient", group: str) -> dict[tuple[str, int], int]:
    """Return the committed offsets of a group. Raises KafkaException."""
    from confluent_kafka import ConsumerGroupTopicPartitions

    request = ConsumerGroupTopicPartitions(group)
    (future,) = admin.list_consumer_group_offsets([request]).values()
    rows = future.result(REQUEST_SECONDS).topic_partitions
    _check(rows)
    return {(row.topic, row.partition): row.offset for row in rows if row.offset >= 0}


def _check(rows: "Sequence[TopicPartition]") -> None:
    from confluent_kafka import KafkaException

    for row in rows:
        if row.error is not None:
            raise KafkaException(row.error)


def _ends(
    admin: "AdminClient", keys: Sequence[tuple[str, int]]
) -> dict[tuple[str, int], int | None]:
    """Return the end offsets; None for a partition that is missing or that you may not see."""
    from confluent_kafka import KafkaException, TopicPartition
    from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]

    if not keys:
        return {}
    latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
    asked = {TopicPartition(topic, number): latest for topic, number in keys}
    ends: dict[tuple[str, int], int | None] = dict.fromkeys(keys)
    answers = admin.list_offsets(asked, request_timeout=REQUEST_SECONDS)
    for key, future in answers.items():
        try:
            ends[key.topic, key.partition] = future.result().offset
        except KafkaException:
            continue  # shown without an end
    return ends
