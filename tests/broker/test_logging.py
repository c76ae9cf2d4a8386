import asyncio
import io
import json
import logging
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import structlog

from broker.logging import (
    AUDIT,
    EVENT_LINES_PER_BURST,
    EVENT_LINES_PER_SECOND,
    LINES_PER_BURST,
    RECENT_CHARACTERS_MAX,
    RECENT_EVENTS_MAX,
    REPEAT_SECONDS,
    REPEATED_MAX,
    SUBJECTS_MAX,
    TEXT_FIELDS_MAX,
    Format,
    LogStream,
    RateLimitedLogger,
    RecentEvents,
    configure,
    may_print,
    open_audit_file,
    recent_audit_events,
)
from tests.support.clocks.manual_clock import ManualClock


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError

    def flush(self) -> None:
        raise BrokenPipeError


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Logging belongs to the process: what a test sets is taken back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


def divide() -> None:
    secret = "password-in-a-local-variable"
    assert secret
    raise ValueError("no good")


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_json_where_nobody_reads_along() -> None:
    stream = io.StringIO()
    configure("info", "auto", stream)
    structlog.get_logger("broker.x").info("job finished", bytes=3, key=b"\xff")
    (line,) = lines(stream)
    assert (line["event"], line["bytes"], line["level"]) == ("job finished", 3, "info")
    assert line["logger"] == "broker.x"
    assert line["key"] == "b'\\xff'"
    assert str(line["timestamp"]).endswith("Z")


@pytest.mark.parametrize(
    ("form", "output", "errors", "allowed"),
    [
        ("auto", Terminal(), Terminal(), True),
        ("auto", io.StringIO(), io.StringIO(), False),  # a container, or a service
        ("auto", Terminal(), io.StringIO(), True),  # 2>log.json at a terminal
        ("auto", io.StringIO(), Terminal(), True),  # text lines: nothing to break
        ("text", io.StringIO(), io.StringIO(), True),
        ("json", Terminal(), Terminal(), False),
        ("json", Terminal(), io.StringIO(), True),
    ],
)
def test_text_for_people_never_comes_between_lines_of_json(
    form: Format, output: io.StringIO, errors: io.StringIO, allowed: bool
) -> None:
    assert may_print(form, output=output, errors=errors) == allowed


def test_a_line_is_text_on_a_terminal_and_where_it_was_asked_for() -> None:
    terminal, pipe = Terminal(), io.StringIO()
    configure("info", "auto", terminal)
    structlog.get_logger().info("job finished", bytes=3)
    assert "job finished" in terminal.getvalue()
    assert not terminal.getvalue().startswith("{")
    structlog.reset_defaults()
    configure("info", "text", pipe)
    structlog.get_logger().info("job finished", bytes=3)
    assert "bytes=3" in pipe.getvalue()
    assert "\x1b" not in pipe.getvalue()


def test_lines_below_the_level_are_left_out() -> None:
    stream = io.StringIO()
    configure("warning", "json", stream)
    structlog.get_logger().info("quiet")
    structlog.get_logger().warning("loud")
    assert [line["event"] for line in lines(stream)] == ["loud"]


def test_libraries_are_written_the_same_way() -> None:
    stream = io.StringIO()
    configure("info", "json", stream)
    logging.getLogger("aiohttp.server").warning("bad request from %s", "x")
    logging.getLogger("asyncio").info("left out")
    (line,) = lines(stream)
    assert (line["event"], line["logger"]) == ("bad request from x", "aiohttp.server")


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_traceback_has_no_local_variables(form: str) -> None:
    stream = io.StringIO()
    configure("info", form, stream)  # type: ignore[arg-type]
    for log in (structlog.get_logger(), logging.getLogger("library")):
        try:
            divide()
        except ValueError:
            log.exception("failed")
    written = stream.getvalue()
    assert written.count("no good") >= 2
    assert "password" not in written.replace('secret = "password-in-a-local-variable"', "")


def test_a_reader_that_went_away_stops_nothing() -> None:
    output = configure("info", "json", Broken())
    structlog.get_logger().info("into the void")
    assert output.lines_lost > 0
    closed = io.StringIO()
    closed.close()
    assert LogStream(closed).write("x") == 0


def test_a_flood_of_one_event_is_written_as_a_burst_then_one_line_a_second() -> None:
    stream, clock = io.StringIO(), ManualClock(1000.0)
    configure("info", "json", stream)
    limited = RateLimitedLogger(structlog.get_logger("broker.x"), clock)
    for _ in range(LINES_PER_BURST + 900):
        limited.info("connection closed", peer="p")
    assert len(lines(stream)) == LINES_PER_BURST
    clock.now += 1.0
    for _ in range(500):
        limited.info("connection closed", peer="p")
    assert len(lines(stream)) == LINES_PER_BURST + 1
    assert lines(stream)[-1]["suppressed"] == 900
    clock.now += 3600.0
    for _ in range(LINES_PER_BURST):
        limited.info("connection closed", peer="p")
    reported = lines(stream)[LINES_PER_BURST + 1 :]
    assert [line.get("suppressed") for line in reported] == [499] + [None] * (LINES_PER_BURST - 1)


async def test_a_line_that_repeats_is_written_at_once_and_then_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream, clock = io.StringIO(), ManualClock(1000.0)
    timers = list[tuple[float, Callable[[], None]]]()
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(
        loop,
        "call_later",
        lambda seconds, call, *args: timers.append((seconds, partial(call, *args))),
    )
    configure("info", "json", stream)
    limited = RateLimitedLogger(structlog.get_logger("broker.x"), clock)
    for _ in range(LINES_PER_BURST + 900):
        limited.info_unless_repeated("operation denied", subject="eve", resource="a")
    limited.info_unless_repeated("operation denied", subject="eve", resource="b")
    assert [(line["resource"], line.get("repeated")) for line in lines(stream)] == [
        ("a", None),
        ("b", None),
    ]
    ((seconds, write),) = timers
    assert seconds == REPEAT_SECONDS
    clock.now += seconds
    write()
    assert (lines(stream)[-1]["resource"], lines(stream)[-1]["repeated"]) == (
        "a",
        LINES_PER_BURST + 899,
    )
    limited.info_unless_repeated("operation denied", subject="eve", resource="a")
    assert len(lines(stream)) == 3
    limited.write_repeated()
    limited.write_repeated()
    assert [line.get("repeated") for line in lines(stream)[3:]] == [1]
    clock.now += REPEAT_SECONDS
    limited.info_unless_repeated("operation denied", subject="eve", resource="a")
    assert [line.get("repeated") for line in lines(stream)[4:]] == [None]


async def test_lines_that_repeat_are_bounded_in_memory_and_in_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream, clock = io.StringIO(), ManualClock(1000.0)
    timers = list[Callable[[], None]]()
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(
        loop, "call_later", lambda _seconds, call, *args: timers.append(partial(call, *args))
    )
    configure("info", "json", stream)
    limited = RateLimitedLogger(structlog.get_logger("broker.x"), clock)
    for _ in range(2):
        for number in range(REPEATED_MAX):
            subject = str(number // LINES_PER_BURST)
            limited.info_unless_repeated("operation denied", subject=subject, number=number)
    assert len(lines(stream)) == len(limited._repeated) == REPEATED_MAX
    clock.now += REPEAT_SECONDS
    for write in timers[:REPEATED_MAX]:
        write()
    assert len(lines(stream)) == REPEATED_MAX + int(REPEAT_SECONDS * EVENT_LINES_PER_SECOND)
    limited.write_repeated()
    assert sum(line.get("repeated", 0) for line in lines(stream)) == REPEATED_MAX
    clock.now += 3600.0
    limited.info_unless_repeated("operation denied", subject="other")
    assert len(limited._repeated) == REPEATED_MAX


def test_a_flood_of_one_event_hides_no_other_event() -> None:
    stream = io.StringIO()
    configure("info", "json", stream)
    limited = RateLimitedLogger(structlog.get_logger("broker.x"), ManualClock(1000.0))
    for _ in range(2 * LINES_PER_BURST):
        limited.info("connection closed")
    limited.error("request failed")
    assert lines(stream)[-1]["event"] == "request failed"


def test_a_flood_of_one_subject_hides_no_other_subject() -> None:
    stream = io.StringIO()
    configure("info", "json", stream)
    limited = RateLimitedLogger(structlog.get_logger("broker.x"), ManualClock(1000.0))
    for _ in range(2 * LINES_PER_BURST):
        limited.info("connection closed", subject="10.0.0.1", peer="10.0.0.1:5")
    limited.info("connection closed", subject="10.0.0.2", peer="10.0.0.2:5")
    assert len(lines(stream)) == LINES_PER_BURST + 1
    assert lines(stream)[-1]["peer"] == "10.0.0.2:5"
    assert "subject" not in lines(stream)[-1]


def test_a_flood_of_many_subjects_is_bounded_in_lines_and_in_memory() -> None:
    stream, clock = io.StringIO(), ManualClock(1000.0)
    configure("info", "json", stream)
    limited = RateLimitedLogger(structlog.get_logger("broker.x"), clock)
    for number in range(2 * SUBJECTS_MAX):
        limited.info("connection closed", subject=str(number))
    assert len(lines(stream)) == EVENT_LINES_PER_BURST
    assert len(limited._subjects) == SUBJECTS_MAX
    clock.now += 1.0
    for number in range(100):
        limited.info("connection closed", subject=str(number))
    assert len(lines(stream)) == EVENT_LINES_PER_BURST + int(EVENT_LINES_PER_SECOND)


def test_lines_that_were_left_out_are_counted() -> None:
    configure("info", "json", io.StringIO())
    limited = RateLimitedLogger(structlog.get_logger("broker.x"), ManualClock(1000.0))
    before = RateLimitedLogger.suppressed_total
    for _ in range(LINES_PER_BURST + 7):
        limited.info("connection closed")
    assert RateLimitedLogger.suppressed_total - before == 7


def test_a_long_info_line_is_shortened_for_people_only() -> None:
    fields = {f"field{number}": number for number in range(TEXT_FIELDS_MAX + 5)}
    for form in ("text", "json"):
        stream = io.StringIO()
        structlog.reset_defaults()
        configure("info", form, stream)
        structlog.get_logger("test").info("job finished", **fields)
        structlog.get_logger("test").error("job failed", **fields)
        structlog.get_logger(AUDIT).info("topic created", **fields)
        counts = [line.count("field") for line in stream.getvalue().splitlines()]
        shown = TEXT_FIELDS_MAX if form == "text" else len(fields)
        assert counts == [shown, len(fields), len(fields)]


@pytest.mark.parametrize("name", ["a\x1b[31mgroup", "a\x1b[31m group", "a\ngroup", "a\u202egroup"])
def test_a_name_that_a_client_chose_has_no_effect_on_a_terminal(name: str) -> None:
    stream = io.StringIO()  # without colors
    configure("info", "text", stream)
    structlog.get_logger("test").info("member expired", member=name)
    start = stream.getvalue().index("member=")
    assert "\\" in stream.getvalue()[start:]
    assert name not in stream.getvalue()
    assert stream.getvalue().count("\n") == 1


def test_the_last_audit_events_stay_in_memory_within_their_limits() -> None:
    events = RecentEvents()
    for number in range(RECENT_EVENTS_MAX + 5):
        events.add({"event": number})
    kept = list(events.newest())
    assert len(kept) == RECENT_EVENTS_MAX
    assert kept[0] == (RECENT_EVENTS_MAX + 5, json.dumps({"event": RECENT_EVENTS_MAX + 4}))
    assert [number for number, _ in events.newest(before=8)] == [7, 6]
    events.add({"event": "x" * (RECENT_CHARACTERS_MAX - 1000)})
    assert sum(len(text) for _, text in events.newest()) <= RECENT_CHARACTERS_MAX


def test_events_of_one_principal_do_not_displace_those_of_others() -> None:
    events = RecentEvents()
    events.add({"event": "topic deleted", "principal": "User:ann"})
    for number in range(3 * RECENT_EVENTS_MAX):
        events.add({"event": number, "principal": "User:eve"})
    kept = list(events.newest())
    assert len(kept) == RECENT_EVENTS_MAX
    assert json.loads(kept[-1][1])["principal"] == "User:ann"
    assert [number for number, _ in kept] == sorted((n for n, _ in kept), reverse=True)


def test_only_lines_of_the_audit_log_are_remembered() -> None:
    configure("info", "json", io.StringIO())
    structlog.get_logger("broker.x").info("job finished")
    structlog.get_logger(AUDIT).info("operation denied", principal="User:zoe")
    _, text = next(recent_audit_events.newest())
    assert json.loads(text)["principal"] == "User:zoe"
    assert json.loads(text)["timestamp"]
    configure("info", "json", io.StringIO(), audits=False)
    structlog.get_logger(AUDIT).info("operation denied", principal="User:yan")
    assert next(recent_audit_events.newest())[1] == text


def test_an_audit_file_that_is_a_pipe_without_a_reader_is_refused(tmp_path: Path) -> None:
    """An ordinary open waits for a reader, and the start with it."""
    path = str(tmp_path / "pipe")
    os.mkfifo(path)
    with pytest.raises(OSError, match="no process reads this pipe"):
        open_audit_file(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open_audit_file(path) as stream, open(reader, "rb") as received:
        stream.write("line\n")
        assert received.read(5) == b"line\n"


def test_an_audit_file_grows(tmp_path: Path) -> None:
    for text in ("first\n", "second\n"):
        with open_audit_file(str(tmp_path / "audit")) as stream:
            stream.write(text)
    assert (tmp_path / "audit").read_text() == "first\nsecond\n"


@pytest.mark.parametrize("is_journal", [True, False])
def test_lines_in_the_journal_of_systemd_have_a_priority(
    is_journal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "log").open("w+") as stream, (tmp_path / "audit").open("w+") as audit:
        status = os.fstat(stream.fileno())
        inode = status.st_ino if is_journal else status.st_ino + 1
        monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{inode}")
        configure(stream=stream, audit_stream=audit)
        structlog.get_logger("broker.test").info("opened")
        structlog.get_logger("broker.test").error("failed")
        logging.getLogger("library").warning("odd")
        structlog.get_logger(AUDIT).info("denied")
        for file in (stream, audit):
            file.flush()
            file.seek(0)
        lines, audited = stream.read().splitlines(), audit.read().splitlines()
    prefixes = ["<6>", "<3>", "<4>"] if is_journal else ["", "", ""]
    assert [line.partition("{")[0] for line in lines] == prefixes
    assert [json.loads(line)["event"] for line in audited] == ["denied"]
