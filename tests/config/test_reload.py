"""What of a settings file that is read anew takes effect, and which keys have none."""

from typing import Any

import pytest
from pydantic import ValidationError

from config.reload import hidden_keys, reloaded
from config.settings import Settings


def settings(**changes: Any) -> Settings:
    return Settings.model_validate(changes)


def keyed(**keys: str) -> dict[str, Any]:
    return {"keys": {name.replace("_", "."): value for name, value in keys.items()}}


def test_a_file_that_says_the_same_changes_nothing() -> None:
    file = {"topics": {"a": keyed(retention_ms="5")}, "cleaner": {"workers": 2}}
    result = reloaded(settings(**file), settings(**file))
    assert (result.changed, result.fixed) == ((), ())
    assert result.settings == settings(**file)


def test_topics_defaults_and_the_cleaner_change_and_the_rest_waits_for_a_start() -> None:
    running = settings(topics={"a": keyed(retention_ms="5"), "b": {}})
    file = settings(
        listeners=["127.0.0.1:1"],
        http="127.0.0.1:2",
        log_dirs=["elsewhere"],
        topics={"a": {"partitions": 3} | keyed(retention_ms="6", segment_ms="7"), "c": {}},
        topic_defaults={"partitions": 2} | keyed(retention_bytes="8"),
        cleaner={"workers": 2, "nice": 3, "enabled": False},
        limits={"connections": 9},
        groups={"members": 9},
        auto_create_topics=False,
        logging={"level": "debug"},
    )
    result = reloaded(running, file)
    assert set(result.changed) == {
        "topics.a.partitions", "topics.a.retention.ms", "topics.a.segment.ms", "topics.b",
        "topics.c", "topic_defaults.partitions", "topic_defaults.retention.bytes",
        "cleaner.workers", "cleaner.nice", "auto_create_topics",
    }  # fmt: skip
    assert set(result.fixed) == {
        "listeners", "http", "log_dirs", "cleaner.enabled", "limits.connections",
        "groups.members", "logging.level",
    }  # fmt: skip
    assert result.settings.topics == file.topics
    assert result.settings.cleaner.workers == 2
    assert result.settings.cleaner.enabled
    assert result.settings.limits == running.limits
    assert result.settings.listeners == running.listeners


def test_what_is_kept_and_what_is_new_must_not_contradict_each_other() -> None:
    running = settings(limits={"partitions": 10})
    file = settings(limits={"partitions": 100}, topics={"a": {"partitions": 50}})
    with pytest.raises(ValidationError, match="the topics have 50 partitions"):
        reloaded(running, file)


def test_each_key_that_a_dynamic_one_hides_is_named() -> None:
    file = settings(
        topics={"a": keyed(retention_ms="5", segment_ms="6"), "b": keyed(retention_ms="5")},
        topic_defaults=keyed(retention_ms="7"),
        cleaner={"workers": 2, "read_bytes_per_second": "1MiB"},
        limits={"connections": 50},
        producer_id_expiration_ms=5_000,
    )
    topics = {"a": {"retention.ms": "8", "segment.ms": "6"}}  # the second one says the same
    broker = {
        "log.retention.ms": "9",
        "log.cleaner.threads": "4",
        "log.cleaner.io.max.bytes.per.second": "1000000.0",
        "log.cleaner.backoff.ms": "1",  # the file says nothing of it
        "max.connections": "60",
        "max.connections.per.ip": "6",  # likewise
        "producer.id.expiration.ms": "7000",
    }
    assert [(hidden.key, hidden.value, hidden.by, hidden.dynamic_value) for hidden in
            hidden_keys(file, topics, broker)] == [
        ("topics.a.retention.ms", "5", "retention.ms", "8"),
        ("topic_defaults.retention.ms", "7", "log.retention.ms", "9"),
        ("cleaner.workers", "2", "log.cleaner.threads", "4"),
        ("cleaner.read_bytes_per_second", "1048576", "log.cleaner.io.max.bytes.per.second",
         "1000000.0"),
        ("limits.connections", "50", "max.connections", "60"),
        ("producer_id_expiration_ms", "5000", "producer.id.expiration.ms", "7000"),
    ]  # fmt: skip
