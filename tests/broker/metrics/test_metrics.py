"""What /metrics says, and that nothing is counted for nobody."""

import asyncio
import re
import shutil
import subprocess
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import fields
from math import inf, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

import broker.http.exposition
import broker.metrics.broker_metrics
import broker.metrics.cleaner_metrics
import broker.metrics.security_metrics
from broker.counters import BrokerStats, HttpRouteStats, LatencyHistogram, RejectStats, TopicStats
from broker.event_loop.directory_threads import DirectoryThreads
from broker.event_loop.loop_turns import FREED_AT_ONCE, FreedLater, Turns
from broker.groups.live_classic_group import GroupStats
from broker.http.exposition import encoded
from broker.lifecycle.readiness import Readiness
from broker.metrics.consumer_metrics import SERIES_BYTES_MAX, ConsumerMetrics
from broker.metrics.startup_metrics import StartupMetrics
from broker.metrics.view_metrics import view_families
from broker.network.listener import ListenerStats
from broker.topics.log_maintenance import LogMaintenanceStats
from cleaner.host import Foreground
from cleaner.stats import PoolStats
from protocol.api import ApiKey
from protocol.errors import ErrorCode
from protocol.messages import (
    DeleteTopicsRequest,
    FindCoordinatorRequest,
    ListGroupsRequest,
    MetadataRequest,
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetCommitResponse,
)
from storage.errors import LogDirectoryError
from storage.manager.log_manager import LogManager
from tests.support.broker.broker_in_memory import broker_in_memory
from tests.support.broker.http_client import get, scraped
from tests.support.broker.metric_rules import complaints
from tests.support.protocol.raw_client import RawClient
from tests.support.storage.logs import batch_of
from tests.support.storage.memory_env import MemoryEnv
from tests.support.waiting import wait_until

SOURCE = "".join(
    Path(module.__file__ or "").read_text()
    for module in (
        broker.metrics.broker_metrics,
        broker.metrics.cleaner_metrics,
        broker.metrics.security_metrics,
    )
)
# Names that dashboards for Kafka look for.
KAFKA_NAMES = (
    "kafka_controller_kafkacontroller_activecontrollercount",
    "kafka_controller_kafkacontroller_offlinepartitionscount",
    "kafka_log_log_size",
    "kafka_log_logcleaner_max_compaction_delay_secs",
    "kafka_log_logcleanermanager_max_dirty_percent",
    "kafka_log_logcleanermanager_uncleanable_partitions_count",
    "kafka_log_logmanager_offlinelogdirectorycount",
    "kafka_network_requestmetrics_requests",
    "kafka_server_brokertopicmetrics_bytesin",
    "kafka_server_brokertopicmetrics_bytesout",
    "kafka_server_brokertopicmetrics_messagesin",
    "kafka_server_delayedoperationpurgatory_purgatorysize",
    "kafka_server_replicamanager_leadercount",
    "kafka_server_replicamanager_partitioncount",
    "kafka_server_replicamanager_underreplicatedpartitions",
    "process_resident_memory_bytes",
)


@pytest.mark.parametrize(
    "counters",
    [
        BrokerStats,
        GroupStats,
        HttpRouteStats,
        LogMaintenanceStats,
        ListenerStats,
        PoolStats,
        RejectStats,
        TopicStats,
    ],
    ids=lambda counters: counters.__name__,
)
def test_whatever_is_counted_is_exported(counters: type) -> None:
    not_exported = {"deleted_topics"}  # a part of sums for the cleaner's budgets
    names = {field.name for field in fields(counters)} - not_exported
    assert {name for name in names if not re.search(rf"\.{name}\b", SOURCE)} == set()


async def test_numbers_move_under_the_names_dashboards_know() -> None:
    async with broker_in_memory(MemoryEnv(seed=3), topics={"orders": {}}) as running:
        client = RawClient(running.addresses[0].port)
        with client:
            await asyncio.to_thread(client.produce, "orders", bytes(batch_of(b"one", b"two")))
            await asyncio.to_thread(client.produce, "orders", b"\xff" * 80)
            await asyncio.to_thread(client.fetch, "orders")

        families = {
            family.name: family for family in text_string_to_metric_families(await scraped(running))
        }
    assert set(KAFKA_NAMES) <= families.keys()

    def value(family: str, **labels: str) -> float:
        results = [
            sample.value
            for sample in families[family].samples
            if sample.labels == labels and not sample.name.endswith("_created")
        ]
        assert len(results) == 1, (family, labels, families[family].samples)
        return results[0]

    assert value("kafka_server_brokertopicmetrics_messagesin", topic="orders") == 2
    assert value("kafka_server_brokertopicmetrics_failedproducerequests", topic="orders") == 1
    assert value("kafka_server_brokertopicmetrics_totalfetchrequests", topic="orders") == 1
    assert value("kafka_log_log_logendoffset", topic="orders", partition="0") == 2
    assert value("kafka_network_requestmetrics_requests", request="Produce", version="9") == 2
    assert value("varve_connections_accepted") == 1
    assert value("varve_clock_trusted") == 1


async def test_records_that_wait_for_an_fsync_are_counted() -> None:
    topics = {"orders": {"keys": {"varve.flush.on.ack": "true"}}}
    async with broker_in_memory(MemoryEnv(seed=3), topics=topics) as running:
        with RawClient(running.addresses[0].port) as client:
            batch = bytes(batch_of(b"one", b"two"))
            await asyncio.to_thread(client.produce, "orders", batch)
        traffic = running.stats.foreground()
    assert traffic.bytes_in == len(batch)


async def test_requests_are_counted_by_the_version_that_the_client_used() -> None:
    async with broker_in_memory(MemoryEnv(seed=3), topics={"orders": {}}) as running:

        def ask() -> None:
            with RawClient(running.addresses[0].port) as client:
                client.request(ApiKey.METADATA, 12, MetadataRequest(topics=[]))
                client.request(ApiKey.LIST_GROUPS, 4, ListGroupsRequest())
                client.send_frame(bytes((0, 18, 0x7F, 0xFF, 0, 0, 0, 9, 0xFF, 0xFF)))
                client.receive_frame()  # what is answered to any version of ApiVersions

        await asyncio.to_thread(ask)
        text = await scraped(running)
    for api, version in (("Metadata", "12"), ("ListGroups", "4"), ("ApiVersions", "unsupported")):
        labels = f'{{request="{api}",version="{version}"}}'
        assert f"kafka_network_requestmetrics_requests_total{labels} 1.0\n" in text
    assert 'version="0"' not in text


async def test_series_of_a_deleted_topic_go_away_and_sums_stay() -> None:
    view = {"keys": {"cleanup.policy": "delete", "varve.view": "compacted"}}
    async with broker_in_memory(MemoryEnv(seed=3), topics={"orders": view, "kept": {}}) as running:

        def delete() -> None:
            with RawClient(running.addresses[0].port) as client:
                client.produce("orders", bytes(batch_of(b"one", b"two")))
                client.fetch("orders.compacted")
                before.append(running.stats.foreground())
                client.request(ApiKey.DELETE_TOPICS, 1, DeleteTopicsRequest(
                    topic_names=["orders"], timeout_ms=10_000))  # fmt: skip

        before: list[Foreground] = []
        await asyncio.to_thread(delete)
        text = await scraped(running)
        after = running.stats.foreground()
    assert 'topic="kept"' in text
    assert "orders" not in text
    assert before[0].bytes_in > 0
    assert after == before[0]


async def after_some_work() -> str:
    """/metrics of a broker with a view, a cleaned log's verdicts, requests, flushes and groups."""
    topics = {
        "orders": {"keys": {"cleanup.policy": "compact", "varve.flush.on.ack": "true"}},
        "viewed": {"keys": {"varve.view": "compacted"}},
    }
    async with broker_in_memory(MemoryEnv(seed=3), "/disk1", "/disk2", topics=topics) as running:
        await asyncio.to_thread(work, running.addresses[0].port)
        await running.pool.scanner.scan()
        return await scraped(running)


def work(port: int) -> None:
    with RawClient(port) as client:
        for _ in range(3):
            client.produce("orders", bytes(batch_of(b"one", b"two")))
        client.produce("orders", b"\xff" * 80)
        client.fetch("orders")
        client.fetch("viewed.compacted")
        client.request(ApiKey.FIND_COORDINATOR, 4, FindCoordinatorRequest(coordinator_keys=["g"]))
        for topic, partition, offset in (("orders", 0, 2), ("viewed.compacted", 0, 0),
                                         ("orders", 7, 1)):  # fmt: skip
            commit(client, "g", topic, partition, offset)


def commit(client: RawClient, group: str, topic: str, partition: int, offset: int) -> None:
    """As soon as the group is loaded."""
    row = OffsetCommitRequestPartition(
        partition_index=partition, committed_offset=offset, committed_metadata=""
    )
    body = OffsetCommitRequest(
        group_id=group,
        generation_id_or_member_epoch=-1,
        topics=[OffsetCommitRequestTopic(name=topic, partitions=[row])],
    )

    def error() -> int:
        answer = client.request(ApiKey.OFFSET_COMMIT, 8, body)
        assert isinstance(answer, OffsetCommitResponse)
        return answer.topics[0].partitions[0].error_code

    loading = {ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, ErrorCode.COORDINATOR_NOT_AVAILABLE}
    wait_until(lambda: error() not in loading, "the group is loaded")


async def pages() -> dict[str, str]:
    """/metrics of a running broker and of one that still opens its logs."""
    env = MemoryEnv(seed=3)
    manager = LogManager(env, ["/disk1", "/disk2"])
    manager.lock()
    threads = DirectoryThreads(env.monotonic)
    readiness = Readiness(manager, threads, failures=())
    starting = StartupMetrics(manager, readiness)
    encode, _ = choose_encoder("text/plain")
    return {
        "running": await after_some_work(),
        "starting": (await encoded(await starting.snapshot(), encode, FreedLater())).decode(),
    }


async def test_metrics_keep_the_rules_of_prometheus() -> None:
    assert {phase: complaints(page) for phase, page in (await pages()).items()} == {
        "running": set(), "starting": set()}  # fmt: skip
    for broken, reason in (
        ("# HELP a_ms x\n# TYPE a_ms gauge\na_ms 1\n", "abbreviated unit"),
        ("# HELP a x\n# TYPE a gauge\na 1\na 2\n", "a series twice"),
        ('# HELP a x\n# TYPE a gauge\na{quantile="1"} 1\n', "a quantile outside of a summary"),
        ('# HELP a x\n# TYPE a gauge\na{logDirectory="/d"} 1\n', "camelCase"),
        ("# TYPE a gauge\na 1\n", "no help text"),
    ):
        assert {complaint.partition(": ")[2] for complaint in complaints(broken)} == {reason}


async def test_help_texts_differ_and_have_no_full_stop() -> None:
    page = (await pages())["running"]
    families = [
        family
        for family in text_string_to_metric_families(page)
        if family.name.startswith(("varve_", "kafka_"))
    ]
    assert len(families) > 100
    assert [family.name for family in families if family.documentation.endswith(".")] == []
    # Some metrics of Kafka have the same value under two names.
    texts = Counter(f.documentation for f in families if f.name.startswith("varve_"))
    assert [text for text, count in texts.items() if count > 1] == []


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
async def test_promtool_reports_nothing() -> None:
    for phase, page in (await pages()).items():
        done = await asyncio.to_thread(promtool, page)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), phase
    refused = await asyncio.to_thread(promtool, "# HELP a_ms x\n# TYPE a_ms gauge\na_ms 1\n")
    assert "a_ms" in refused.stdout + refused.stderr


def promtool(page: str) -> "subprocess.CompletedProcess[str]":
    command = ["promtool", "check", "metrics"]
    return subprocess.run(command, input=page, capture_output=True, text=True, check=False)


async def test_latencies_are_histograms_that_can_be_added_up() -> None:
    text = await after_some_work()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for name, labels in (("varve_request_seconds", {"request": "Produce"}),
                         ("varve_flush_seconds", {})):  # fmt: skip
        assert families[name].type == "histogram"
        buckets = [
            (float(sample.labels["le"]), sample.value)
            for sample in families[name].samples
            if sample.name.endswith("_bucket") and labels.items() <= sample.labels.items()
        ]
        counts = [count for _, count in buckets]
        assert counts == sorted(counts)
        assert buckets == sorted(buckets)
        assert buckets[-1][0] == float("inf")
        assert counts[-1] >= 3
    assert 'kafka_network_requestmetrics_totaltimems_count{request="Produce"} 4.0' in text
    assert families["kafka_log_logflushstats_logflushrateandtimems"].type == "summary"


def test_a_bucket_counts_what_took_less_than_its_bound() -> None:
    latency = LatencyHistogram()
    for microseconds in (0, 63, 64, 255, 256, 20_000_000):
        latency.add(microseconds)
    assert latency.cumulative()[:2] == [(0.000064, 2), (0.000256, 4)]
    assert latency.cumulative()[-1] == (16.777216, 5)


async def test_consumer_lag_is_told_of_partitions_that_are_served() -> None:
    text = await after_some_work()
    labels = 'consumergroup="g",partition="0",topic="orders"'
    assert f"kafka_consumergroup_current_offset{{{labels}}} 2.0\n" in text
    assert f"kafka_consumergroup_lag{{{labels}}} 4.0\n" in text
    assert 'kafka_consumergroup_lag_sum{consumergroup="g",topic="orders"} 4.0\n' in text
    assert 'kafka_consumergroup_members{consumergroup="g"} 0.0\n' in text
    view = 'consumergroup="g",partition="0",topic="viewed.compacted"'
    assert f"kafka_consumergroup_lag{{{view}}} 0.0\n" in text
    assert 'consumergroup="g",partition="7"' not in text


def lags(committed: Mapping[str, int], owners: Mapping[str, str]) -> dict[str, Any]:
    """The samples of a broker whose groups have so many offsets, each of a topic of its own."""
    summaries = [SimpleNamespace(group_id=group, members=1) for group in committed]

    def fetch(group: str) -> tuple[ErrorCode, dict[tuple[str, int], tuple[int]]]:
        return ErrorCode.NONE, {(f"t{number}", 0): (1,) for number in range(committed[group])}

    groups: Any = SimpleNamespace(
        groups=lambda: iter(summaries), offsets=SimpleNamespace(fetch=fetch, owner=owners.get)
    )
    topics: Any = SimpleNamespace(readable_end=lambda *_: 3)
    families = [step for step in ConsumerMetrics(groups, topics).steps() if step is not None]
    return {family.name: family.samples for family in families}


def test_the_text_about_consumers_is_bounded() -> None:
    """Prometheus gives up after 10 s; without a bound, 60 commits made 49 MB in 13 s."""
    many = {f"{number:03}".ljust(900, "x"): 1_000 for number in range(60)}
    samples = lags(many, {})
    size_bytes = sum(
        len("".join([sample.name, *sample.labels.values()])) for each in samples.values()
        for sample in each
    )  # fmt: skip
    assert 4 << 20 < size_bytes < SERIES_BYTES_MAX
    (offsets,) = samples["varve_consumer_offsets_left_out"]
    (groups,) = samples["varve_consumer_groups_left_out"]
    assert offsets.value == 1_000 * groups.value > 0


def test_many_offsets_of_one_principal_hide_no_group_of_another() -> None:
    committed = {f"eve-{number}": 1_000 for number in range(60)} | {"victim": 1_000}
    owners = {group: group.partition("-")[0] for group in committed}
    samples = lags(committed, owners)["kafka_consumergroup_lag"]
    shown = Counter(sample.labels["consumergroup"] for sample in samples)
    assert shown["victim"] == 1_000
    assert set(shown.values()) == {1_000}, "a group has all of its series or none"


def test_large_groups_of_one_principal_hide_no_small_one() -> None:
    samples = lags({f"large-{number}": 1_000 for number in range(60)} | {"small": 10}, {})
    names = [sample.labels["consumergroup"] for sample in samples["kafka_consumergroup_members"]]
    assert "small" in names


async def test_each_data_directory_says_whether_it_works_and_how_full_its_disk_is() -> None:
    env = MemoryEnv(seed=3)
    async with broker_in_memory(env, "/disk1", "/disk2") as running:
        running.failed_directories.fail(LogDirectoryError("/disk2", "it was pulled out"))
        text = await scraped(running)
        assert 'kafka_log_logmanager_logdirectoryoffline{logdirectory="/disk1"} 0.0\n' in text
        assert 'kafka_log_logmanager_logdirectoryoffline{logdirectory="/disk2"} 1.0\n' in text
        for name, size_bytes in (
            ("free", env.free_bytes("/disk1")),
            ("size", env.total_bytes("/disk1")),
        ):
            match = re.search(rf'^varve_disk_{name}_bytes{{directory="/disk1"}} (.+)$', text, re.M)
            assert match is not None
            assert float(match[1]) == size_bytes
        await running.log_maintenance.measure_disks()
        assert 'free_bytes{directory="/disk2"}' not in await scraped(running)


async def test_metrics_on_the_page_exist() -> None:
    page = (Path(__file__).parents[3] / "docs/reference/metrics.md").read_text()
    page, _, mapping = page.partition("## Names that differ from Kafka's")
    reported = set(re.findall(r"\b((?:kafka|varve)_\w+)", page))
    local = re.findall(r"^\|.*\| `(\w+)` \|$", mapping, re.M)  # the last column
    assert len(local) == 1
    reported |= set(local)
    text = await after_some_work()
    samples = {line.partition(" ")[0].partition("{")[0] for line in text.splitlines()}
    samples |= set(re.findall(r"^# HELP (\w+)", text, re.M))  # also families without a series
    reported -= {
        "kafka_exporter",
        "varve_topic_policy_unknown",  # no series where all are known
        "varve_tls_certificate_expiry_timestamp_seconds",  # nor without TLS
        # nor without SASL
        "kafka_server_socket_server_metrics_successful_authentication_total",
    }
    existing = samples | {name.removesuffix("_bucket") for name in samples}
    assert len(reported) > 20
    assert sorted(reported - existing) == []


# Kafka's gauges of LogCleaner and LogCleanerManager, as jmx_exporter names them.
CLEANER_GAUGES = (
    "kafka_log_logcleaner_cleaner_recopy_percent",
    "kafka_log_logcleaner_deadthreadcount",
    "kafka_log_logcleaner_max_buffer_utilization_percent",
    "kafka_log_logcleaner_max_clean_time_secs",
    "kafka_log_logcleaner_max_compaction_delay_secs",
    "kafka_log_logcleanermanager_max_dirty_percent",
)
BY_DIRECTORY = (
    "kafka_log_logcleanermanager_uncleanable_bytes",
    "kafka_log_logcleanermanager_uncleanable_partitions_count",
)


def names_of(text: str) -> set[str]:
    return {family.name for family in text_string_to_metric_families(text)}


async def test_cleaner_metrics_are_those_of_kafka_and_gone_with_the_broker() -> None:
    async with broker_in_memory(MemoryEnv(seed=3), "/disk1", "/disk2") as running:
        text = await scraped(running)
    kafkas = {name for name in names_of(text) if name.startswith("kafka_log_logcleaner")}
    assert kafkas == {*CLEANER_GAUGES, *BY_DIRECTORY}
    for name in BY_DIRECTORY:
        assert text.count(f'{name}{{logdirectory="/disk1"}} 0.0') == 1
        assert text.count(f'{name}{{logdirectory="/disk2"}} 0.0') == 1
    # Nothing is registered anywhere: what a stopped broker knew is not shown by the next one.
    assert not any("logcleaner" in name for name in REGISTRY._names_to_collectors)


async def test_cleaner_metrics_stay_through_a_reconfiguration() -> None:
    async with broker_in_memory(MemoryEnv(seed=3), topics={"orders": {}}) as running:
        before = names_of(await scraped(running))
        changed = {"log.cleaner.threads": "3", "log.cleaner.io.max.bytes.per.second": "1e7"}
        await running.metadata_service.alter_broker(lambda present: {**present, **changed})
        assert names_of(await scraped(running)) == before


async def test_gauges_of_cleans_are_zero_where_no_worker_ever_ran() -> None:
    async with broker_in_memory(MemoryEnv(seed=3)) as running:
        text = await scraped(running)
    for name in (*CLEANER_GAUGES, "varve_cleaner_last_scan_age_seconds"):
        assert f"\n{name} 0.0\n" in text, name


async def test_series_by_partition_are_made_of_compacted_topics_only() -> None:
    topics = {"orders": {"keys": {"cleanup.policy": "compact"}}, "audit": {}}
    async with broker_in_memory(MemoryEnv(seed=3), topics=topics) as running:
        await running.pool.scanner.scan()
        text = await scraped(running)
    labels = '{partition="0",topic="orders"}'
    zeros = ("dirty_ratio", "dirty_bytes", "live_bytes", "dead_bytes", "unresolved_bytes")
    for name in (*zeros, "quarantined"):
        assert f"varve_cleaner_{name}{labels} 0.0\n" in text
    reason = '{partition="0",reason="nothing dirty",topic="orders"}'
    assert f"varve_cleaner_blocked{reason} 1.0\n" in text
    assert not re.search(r"varve_cleaner_\w+\{.*audit", text)
    assert "live_estimate_bytes{" not in text, "nothing was cleaned yet: nobody knows"


async def test_a_scrape_lists_the_descriptors_of_the_process_in_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """10,000 of them take 15 to 30 ms."""
    threads: list[bool] = []
    collect = ProcessCollector.collect

    def note_thread(collector: ProcessCollector) -> Iterable[Metric]:
        threads.append(threading.current_thread() is threading.main_thread())
        return collect(collector)

    monkeypatch.setattr(ProcessCollector, "collect", note_thread)
    async with broker_in_memory(MemoryEnv(seed=1)) as broker:
        threads.clear()
        assert "process_open_fds" in await scraped(broker)
    assert threads == [False]


async def test_others_have_their_turns_between_the_views_and_samples_of_a_scrape() -> None:
    keys = {"cleanup.policy": "compact", "varve.view": "compacted"}
    topics = {"orders": {"partitions": 300, "keys": keys}}
    async with broker_in_memory(MemoryEnv(seed=3), topics=topics) as running:
        assert len(running.view_scheduler.status()) == 300
        steps = list(view_families(running.view_scheduler))
    families = [family for family in steps if family is not None]
    assert {len(family.samples) for family in families} == {300}
    pauses = steps.count(None)
    assert pauses == 300 // 8 + len(families), "one for 8 views, one in each family of 300 samples"


@pytest.mark.parametrize(
    "accept", ["text/plain", "application/openmetrics-text", "text/plain;version=1.0.0"]
)
async def test_a_long_answer_is_as_one_encoding_would_make_it_and_others_have_their_turns(
    accept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered = 0

    class Counted(Turns):
        async def take(self) -> None:
            nonlocal offered
            offered += 1
            await super().take()

    monkeypatch.setattr(broker.http.exposition, "Turns", Counted)
    partitions = {"partitions": 300, "keys": {"cleanup.policy": "compact"}}
    async with broker_in_memory(MemoryEnv(seed=3), topics={"orders": partitions}) as running:
        families = await running.http.server._metrics_source.snapshot()
        encode, _ = choose_encoder(accept)
        text = await encoded(families, encode, FreedLater())

    class AtOnce(Collector):
        def collect(self) -> Iterable[Metric]:
            return families

    assert text == encode(AtOnce())
    assert len(text) > 50_000
    assert offered >= sum(len(family.samples) for family in families) / 64


@pytest.mark.parametrize(
    "accept",
    ["text/plain", "application/openmetrics-text", "text/plain;version=1.0.0;escaping=dots"],
)
async def test_samples_are_written_as_the_library_writes_them(accept: str) -> None:
    labelled = GaugeMetricFamily("a_b", "With \\ and \n", labels=["z", "a"])
    for value in (0, 1, -1.5, 1e6, 123456789, 1e-9, inf, -inf, nan, 2**63, True):
        labelled.add_metric(['\\ " \n \N{SNOWMAN}', str(value)], value)
    dated = GaugeMetricFamily("c_d", "With times", labels=["n"])
    for number in range(3):
        dated.add_metric([str(number)], number, timestamp=number or None)
    created = CounterMetricFamily("e_f", "With the time of creation")
    created.add_metric([], 5, created=7)
    families = [labelled, dated, created, GaugeMetricFamily("g_h", "Empty")]

    class AtOnce(Collector):
        def collect(self) -> Iterable[Metric]:
            return families

    encode, _ = choose_encoder(accept)
    assert await encoded(families, encode, FreedLater()) == encode(AtOnce())


class _Counted(Sample):
    """A sample that counts how many of its like were freed."""

    __slots__ = ()
    freed = 0

    def __del__(self) -> None:
        type(self).freed += 1


async def test_the_samples_of_a_page_are_freed_in_turns_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broker.http.exposition, "Turns", lambda: Turns(seconds=0))
    _Counted.freed = 0

    def families() -> list[Metric]:
        family = GaugeMetricFamily("a_b", "Many", labels=["n"])
        for number in range(10 * FREED_AT_ONCE):
            family.samples.append(_Counted("a_b", {"n": str(number)}, number))
        return [family, GaugeMetricFamily("c_d", "Last", value=1)]

    freed, made = FreedLater(), families()
    encode, _ = choose_encoder("text/plain")
    encoding = encoded(made, encode, freed)
    del made
    await encoding
    assert _Counted.freed == 0
    for _ in range(1000):  # more rounds than the turns need
        await asyncio.sleep(0)
    assert _Counted.freed == 10 * FREED_AT_ONCE


def test_a_quantile_is_exact_to_a_factor_of_two() -> None:
    latency = LatencyHistogram()
    assert latency.quantile_ms(0.99) == 0.0
    for microseconds in [100] * 99 + [900_000]:
        latency.add(microseconds)
    assert 0.1 <= latency.quantile_ms(0.5) <= 0.2
    assert 900 <= latency.quantile_ms(0.999) <= 1800


async def test_http_requests_are_counted_by_their_route() -> None:
    async with broker_in_memory(MemoryEnv(seed=3), topics={"orders": {}, "clicks": {}}) as running:
        for path in ("orders", "clicks", "nothing"):
            await get(running, f"/api/v1/topics/{path}")
        await get(running, "/no/such/page")
        text = await scraped(running)
    route = '{method="GET",route="/api/v1/topics/{topic}"}'
    assert f"varve_http_requests_total{route} 3.0" in text
    assert 'varve_http_requests_total{method="unknown",route="unknown"} 1.0' in text
    (total,) = re.findall(rf"varve_http_loop_seconds_total{re.escape(route)} (\S+)", text)
    (longest,) = re.findall(rf"varve_http_longest_hold_seconds{re.escape(route)} (\S+)", text)
    assert 0 < float(longest) <= float(total) < 1
