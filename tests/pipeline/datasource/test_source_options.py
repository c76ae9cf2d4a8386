"""Options, offsets and filters of the source, without Spark and without a broker."""

import json
from datetime import UTC, datetime
from typing import Any, cast

import pytest
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
)

from pipeline.client.kafka_client import EARLIEST, LATEST, EndOffset, Isolation, WireClient
from pipeline.datasource.batch import VarveReader
from pipeline.datasource.filters import Narrowed
from pipeline.datasource.offsets import (
    DataLossError,
    Range,
    from_json,
    limited,
    split,
    to_json,
)
from pipeline.datasource.options import (
    AtTime,
    Edge,
    ExplicitOffsets,
    OptionError,
    SourceOptions,
    producer_settings,
    read_columns,
    read_source_options,
)
from pipeline.records.columns import ALL_COLUMNS, COLUMNS
from storage.model import TopicPartition

P0, P1, P2 = (TopicPartition("t", n) for n in range(3))


def read(is_stream: bool = False, **options: str) -> SourceOptions:
    values = {"kafka.bootstrap.servers": "h:1"} | options
    if not {"assign", "subscribe", "subscribePattern"} & set(options):
        values["subscribe"] = "t"
    return read_source_options(values, columns=COLUMNS, is_stream=is_stream)


def test_defaults_are_those_of_sparks_source() -> None:
    batch, stream = read(), read(is_stream=True)
    assert (batch.starting, batch.ending) == (Edge.EARLIEST, Edge.LATEST)
    assert stream.starting is Edge.LATEST
    assert batch.isolation is Isolation.READ_UNCOMMITTED
    assert batch.fail_on_data_loss
    assert batch.stall_seconds == 120
    assert read_columns({}) == COLUMNS
    assert read_columns({"includeheaders": "true"}) == ALL_COLUMNS
    assert read_columns({"columns": "timestampMs, offset"}) == ("timestampMs", "offset")
    assert read_columns({"columns": "offset, key"}) == ("offset", "key")


def test_names_are_case_insensitive_and_values_are_not() -> None:
    options = read(SUBSCRIBE="Orders,b , a", STARTINGOFFSETS="EARLIEST", subscribe="Orders,b , a")
    assert options.subscription.topics == ("Orders", "a", "b")
    assert options.starting is Edge.EARLIEST


def test_bounds_are_read_in_sparks_order() -> None:
    each = json.dumps({"t": {"0": 5, "1": -2}})
    assert read(startingOffsets=each).starting == ExplicitOffsets({P0: 5, P1: -2})
    times = json.dumps({"t": {"0": 1000}})
    options = read(startingOffsets=each, startingOffsetsByTimestamp=times)
    assert options.starting == AtTime(None, {P0: 1000})
    options = read(startingOffsetsByTimestamp=times, startingTimestamp="7", endingTimestamp="9")
    assert (options.starting, options.ending) == (AtTime(7, {}), AtTime(9, {}))
    assert read(assign='{"t":[1,0]}').subscription.assigned == (P0, P1)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kafka.bootstrap.servers": ""}, "kafka.bootstrap.servers is required"),
        ({"subscribe": "a", "assign": "{}"}, "exactly one of"),
        ({"subscribe": " "}, "subscribe is empty"),
        ({"subscribe": " , "}, "subscribe names no topic"),
        ({"subscribePattern": "("}, "not a regular expression"),
        ({"assign": "[1]"}, "not a JSON object"),
        ({"assign": '{"t": [-1]}'}, "not like"),
        ({"assign": "{}"}, "names no partition"),
        ({"startingOffsets": "latest"}, "cannot be latest in a batch"),
        ({"endingOffsets": "earliest"}, "cannot be earliest in a batch"),
        ({"startingOffsets": '{"t":{"0":-1}}'}, "not allowed in a batch"),
        ({"endingOffsets": '{"t":{"0":-2}}'}, "not allowed in a batch"),
        ({"startingOffsets": '{"t":{"0":-3}}'}, "is not an offset"),
        ({"startingOffsets": '{"t":{"x":3}}'}, "is not an offset"),
        ({"startingOffsets": '{"t":{"0":true}}'}, "is not an offset"),
        ({"startingOffsets": '{"t":[0]}'}, "not like"),
        ({"startingOffsets": "soon"}, "neither a keyword"),
        ({"startingTimestamp": "-1"}, "startingTimestamp must be an integer"),
        ({"startingOffsetsByTimestampStrategy": "x"}, "not error or latest"),
        ({"minPartitions": "0"}, "minPartitions must be an integer"),
        ({"minPartitions": "many"}, "minPartitions must be an integer"),
        (
            {"kafka.max.partition.fetch.bytes": "2147483648"},
            "must be an integer from 1 to 2147483647",
        ),
        ({"failOnDataLoss": "maybe"}, "must be true or false"),
        ({"maxTriggerDelay": "soon"}, "must be a duration"),
        ({"kafka.isolation.level": "none"}, "kafka.isolation.level"),
        ({"kafka.security.protocol": "SSL3"}, "kafka.security.protocol is SSL3, not one of"),
        ({"kafka.security.protocol": "SASL_SSL"}, "kafka.sasl.mechanism is missing"),
        ({"kafka.ssl.truststore.location": "/x"}, "kafka.ssl.truststore.location /x: No such file"),
        ({"kafka.ssl.cipher.suites": "x"}, "kafka.ssl.cipher.suites is not supported"),
        ({"kafka.bootstrap.servers": "SSL://h:1"}, "does not fit security.protocol PLAINTEXT"),
        ({"kafka.auto.offset.reset": "latest"}, "use startingOffsets"),
        ({"kafka.value.deserializer": "x"}, "values are binary"),
        ({"assign": "[" * 100_000}, "nor JSON"),
        ({"assign": '{"t": [4294967296]}'}, "not like"),
        ({"startingOffsets": '{"t":{"0":9223372036854775808}}'}, "is not an offset"),
        ({"startingOffsets": '{"t":{"%s":1}}' % ("9" * 5000)}, "is not an offset"),
        ({"startingTimestamp": "9223372036854775808"}, "startingTimestamp must be"),
        ({"maxTriggerDelay": "9" * 5000}, "must be a duration"),
        ({"subscribePattern": "(" * 20_000 + ")" * 20_000}, "not a regular expression"),
    ],
)
def test_an_option_that_cannot_be_honoured_is_refused(options: dict[str, str], reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        read(**options)


@pytest.mark.parametrize("columns", ["", "kee", "key,key", "key,offset,x"])
def test_columns_are_those_there_are(columns: str) -> None:
    with pytest.raises(OptionError, match="must name some of key, value"):
        read_columns({"columns": columns})


def test_a_producer_gets_what_stands_behind_kafka() -> None:
    values = {"kafka.bootstrap.servers": "h:1", "kafka.linger.ms": "5", "topic": "t"}
    assert producer_settings(values) == {"linger.ms": "5"}


def test_ranges_are_cut_and_never_put_together() -> None:
    ranges = [Range(P0, 0, 100), Range(P1, 50, 50), Range(P2, 10, 20)]
    assert split(ranges, read()) == [ranges[0], ranges[2]]
    for options in ({"minPartitions": "7"}, {"maxRecordsPerPartition": "13"}):
        pieces = split(ranges, read(**options))
        assert len(pieces) >= 7
        for whole in (ranges[0], ranges[2]):
            mine = [piece for piece in pieces if piece.partition == whole.partition]
            assert (mine[0].first, mine[-1].end) == (whole.first, whole.end)
            assert [p.end for p in mine[:-1]] == [p.first for p in mine[1:]]
            assert all(piece.size for piece in mine)
            if "maxRecordsPerPartition" in options:
                assert max(piece.size for piece in mine) <= 13
    assert len(split([Range(P0, 0, 3)], read(minPartitions="10"))) == 3


def test_a_limit_is_shared_by_what_waits_and_all_is_read_in_the_end() -> None:
    start, latest = {P0: 0, P1: 500, P2: 7}, {P0: 1000, P1: 500, P2: 8}
    first = limited(start, latest, 100)
    assert first == {P0: 99, P1: 500, P2: 8}
    assert limited(start, latest, 5000) == latest
    steps = 0
    while start != latest:
        start = limited(start, latest, 10)
        steps += 1
        assert steps < 200
    assert limited({P0: 9}, {P0: 3}, 1) == {P0: 3}


def test_offsets_are_written_the_same_whatever_their_order() -> None:
    offsets = {
        TopicPartition("b", 10): EndOffset(3, 7),
        TopicPartition("b", 9): EndOffset(2, 0),
        TopicPartition("a", 0): EndOffset(1, -1),  # as in earlier releases
    }
    text = json.dumps(to_json(offsets))
    assert text == '{"a": {"0": 1}, "b": {"9": [2, 0], "10": [3, 7]}}'
    assert text == json.dumps(to_json(dict(reversed(list(offsets.items())))))
    assert from_json(json.loads(text)) == offsets


def pushed(*filters: Any) -> tuple[Narrowed, list[Any]]:
    narrowed = Narrowed()
    return narrowed, [each for each in filters if not narrowed.push(each)]


def test_filters_of_offsets_and_partitions_are_taken_over() -> None:
    narrowed, remaining = pushed(
        GreaterThan(("offset",), 10),
        LessThanOrEqual(("offset",), 20),
        GreaterThanOrEqual(("partition",), 1),
        Not(EqualTo(("partition",), 2)),
        EqualTo(("topic",), "t"),
        IsNotNull(("offset",)),
    )
    assert remaining == []
    assert (narrowed.first_offset, narrowed.end_offset) == (11, 21)
    assert [p for p in (P0, P1, P2, TopicPartition("u", 1)) if narrowed.includes(p)] == [P1]
    narrowed, remaining = pushed(In(("partition",), (0, 2)), In(("topic",), ("t", "u")))
    assert remaining == []
    assert [p for p in (P0, P1, P2) if narrowed.includes(p)] == [P0, P2]


def test_what_is_only_narrowed_or_not_known_is_left_to_spark() -> None:
    since = datetime(2026, 1, 1, microsecond=1999, tzinfo=UTC)
    filters = [
        In(("offset",), (5, 9)),
        GreaterThan(("timestamp",), since),
        EqualTo(("key",), b"k"),
        IsNotNull(("value",)),
        IsNull(("offset",)),
        Not(EqualTo(("offset",), 5)),
        Not(LessThan(("partition",), 5)),
        EqualTo(("partition",), True),
        LessThan(("timestamp",), since),
        EqualTo(("headers", "key"), "x"),
    ]
    narrowed, remaining = pushed(*filters)
    assert remaining == filters
    assert (narrowed.first_offset, narrowed.end_offset) == (5, 10)
    assert narrowed.from_ms == round(datetime(2026, 1, 1, tzinfo=UTC).timestamp() * 1000) + 1
    assert narrowed.includes(P0)


def test_a_time_before_1970_narrows_nothing() -> None:
    """Negative times have a special meaning in ListOffsets, and records may have earlier ones."""
    before = datetime(1969, 12, 31, 23, 59, 59, tzinfo=UTC)
    for kind in (EqualTo, EqualNullSafe, GreaterThan, GreaterThanOrEqual):
        narrowed, _ = pushed(kind(("timestamp",), before))
        assert narrowed.from_ms is None, kind
    since = datetime(1970, 1, 1, second=5, tzinfo=UTC)
    narrowed, _ = pushed(GreaterThan(("timestamp",), since), GreaterThan(("timestamp",), before))
    assert narrowed.from_ms == 5000


class MovingLog:
    """A client of a log whose start retention moves after it was listed once."""

    def __init__(self) -> None:
        self.starts = iter((0, 10))

    def partitions(self, topics: list[str]) -> dict[str, list[int]]:
        return {"t": [0]}

    def offsets(
        self, requested: dict[TopicPartition, int], *_: object
    ) -> dict[TopicPartition, int]:
        starts = {EARLIEST: lambda: next(self.starts), LATEST: lambda: 50}
        return {which: starts[when]() for which, when in requested.items()}


@pytest.mark.parametrize("start", ["earliest", '{"t": {"0": -2}}'])
def test_a_batch_from_the_start_begins_where_retention_has_moved_it(start: str) -> None:
    reader = VarveReader(read(startingOffsets=start, minPartitions="2"))
    ranges = reader._ranges(cast("WireClient", MovingLog()))
    assert ranges == [Range(P0, 10, 50)]
    assert all(piece.from_start for piece in split(ranges, reader._options))


def test_a_batch_from_an_offset_that_is_gone_is_an_error() -> None:
    client = MovingLog()
    next(client.starts)
    reader = VarveReader(read(startingOffsets='{"t": {"0": 5}}'))
    with pytest.raises(DataLossError, match="offset 5 requested, but the log starts at 10"):
        reader._ranges(cast("WireClient", client))
