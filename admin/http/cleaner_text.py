"""What `varve cleaner` prints for people. Pure: the API's answers in, lines out."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Final

from admin.client import Json
from admin.tables import columns, local_time
from config.topics.names import INTERNAL_TOPICS
from config.units import about_size, about_span, counted, format_size

STARTING: Final = "starting; the first start of an installation compiles native code for a while"
ROWS_MAX: Final = 5000  # of a table; --topic and --json show the rest


def status_lines(answer: Json, rows: Sequence[Json], topic: str | None = None) -> list[str]:
    """Return a summary of the cleaner or of one topic, and a table of partitions by importance.

    Empty partitions of an internal topic share one line unless `topic` names it.
    """
    if topic is not None:
        return [_topic_headline(topic, rows), "", *_table(rows)]
    partitions = answer["partitions"]
    lines = [_headline(answer)]
    for worker in answer["workers"]:
        job = worker["job"]
        if job is None:
            doing = "idle" if worker["ready"] else STARTING
        else:
            doing = f"{job['topic']}-{job['partition']}: {_stage(job)}"
        lane = "" if worker["lane"] == "regular" else f", for {worker['lane']} jobs"
        lines.append(f"  worker {worker['index']} (pid {worker['pid']}{lane}): {doing}")
    lines += _spark_lines(answer["spark"])
    if partitions["damaged"]:
        lines.append(
            f"  {partitions['damaged']} with damaged batches, which block readers: see "
            "`varve cleaner explain TOPIC PARTITION`"
        )
    for key, text in (("quarantined", "in quarantine"), ("paused", "paused by an operator"),
                      ("offline", "offline"), ("policy_unknown", "policy unknown"),
                      ("over_max_lag", "over max.compaction.lag.ms")):  # fmt: skip
        if partitions[key]:
            lines.append(f"  {partitions[key]} {text}")
    folded = [row for row in rows if _is_folded(row)]
    shown = [row for row in rows if not _is_folded(row)]
    if shown:
        lines += ["", *_table(shown)]
    return lines + _folded_lines(folded)


def _spark_lines(spark: Json) -> list[str]:
    """Return lines on jobs on Spark; none if Spark is not used."""
    lines = []
    if job := spark["job"]:
        numbers = ", ".join(map(str, job["partitions"]))
        where = f"{job['topic']}-{numbers}"
        lines.append(f"  spark ({job['master']}): {where}, {job['seconds']:.0f} s")
    elif spark["unavailable"]:
        wait = about_span(spark["wait_ms"])
        lines.append(
            f"  spark ({spark['master']}): no job can be started, next attempt in {wait}; "
            f"the workers clean its partitions: {spark['unavailable']}"
        )
    elif spark["enabled"]:
        lines.append(f"  spark ({spark['master']}): idle")
    if spark["waiting"]:
        lines.append(f"  {len(spark['waiting'])} waiting for Spark")
    if spark["given_up"]:
        names = ", ".join(f"{item['topic']}-{item['partition']}" for item in spark["given_up"][:10])
        lines.append(
            f"  {len(spark['given_up'])} cleaned by workers after failures on Spark: {names}"
        )
    return lines


def _headline(answer: Json) -> str:
    if not answer["enabled"]:
        return "The cleaner is switched off (cleaner.enabled)."
    partitions = answer["partitions"]
    count = partitions["internal"]
    internal = f" (and {count} of internal topics)" if count else ""
    limits = [
        f"{subject} at most {format_size(round(answer[key]))}/s"
        for key, subject in (
            ("read_bytes_per_second", "reading"),
            ("write_bytes_per_second", "writing"),
        )
        if answer[key] is not None
    ]
    return (
        f"{counted(partitions['compacted'], 'compacted partition')}{internal}, "
        f"{partitions['candidates']} due, "
        f"{partitions['in_progress']} being cleaned; {about_size(answer['cleanable_bytes'])} dirty"
        f"{''.join(f', {limit}' for limit in limits)}"
    )


def _topic_headline(topic: str, rows: Sequence[Json]) -> str:
    due = sum(row["to_clean"] for row in rows)
    cleaned = sum(row["job"] is not None for row in rows)
    paused = sum(row["paused"] for row in rows)
    dirty_bytes = sum(row["dirty_bytes"] or 0 for row in rows)
    return (
        f"{topic}: {counted(len(rows), 'partition')}, {due} due, {cleaned} being cleaned, "
        f"{paused} paused; {about_size(dirty_bytes)} dirty"
    )


def _by_importance(row: Json) -> tuple[bool, bool, float, int, str, int]:
    """Sort damaged first, then quarantined, then by dirty ratio and by bytes to clean."""
    return (
        not row.get("damage"),
        row["state"] != "quarantined",
        -(row["dirty_ratio"] or 0),
        -(row["waiting_bytes"] or 0),
        row["topic"],
        row["partition"],
    )


def _is_folded(row: Json) -> bool:
    """Return whether this is an idle, empty partition of an internal topic, perhaps paused."""
    is_idle = row["state"] == "idle" and not row.get("damage")
    return row["topic"] in INTERNAL_TOPICS and row["size_bytes"] == 0 and is_idle


def _folded_lines(rows: Sequence[Json]) -> list[str]:
    """Return one line per topic for the partitions that the table leaves out."""
    counts = Counter((row["topic"], bool(row["paused"])) for row in rows)
    return [
        f"... and {count} empty{', paused' if is_paused else ''} partition{'s' * (count != 1)} of "
        f"{topic} (--topic {topic} lists them)"
        for (topic, is_paused), count in sorted(counts.items())
    ]


def _table(rows: Sequence[Json]) -> list[str]:
    order = sorted(rows, key=_by_importance)
    table = [("PARTITION", "STATE", "SIZE", "DIRTY", "NOT CLEANABLE", "RATIO", "BLOCKED BY")]
    for row in order[:ROWS_MAX]:
        ratio = row["dirty_ratio"]
        table.append(
            (
                f"{row['topic']}-{row['partition']}",
                row["state"],
                about_size(row["size_bytes"]),
                "-" if row["dirty_bytes"] is None else about_size(row["dirty_bytes"]),
                "-" if row["waiting_bytes"] is None else about_size(row["waiting_bytes"]),
                "-" if ratio is None else f"{ratio:.0%}",
                _obstacle(row),
            )
        )
    lines = columns(table, right={2, 3, 4, 5})
    if len(order) > ROWS_MAX:
        lines.append(f"... and {len(order) - ROWS_MAX} more")
    return lines


def _obstacle(row: Json) -> str:
    if damage := row.get("damage"):
        ranges = ", ".join(
            f"{item['first_offset']}-{item['next_offset'] - 1}" for item in damage[:3]
        )
        more = f" and {len(damage) - 3} more ranges" if len(damage) > 3 else ""
        return f"DAMAGED: offsets {ranges}{more} cannot be read"
    if row["job"] is not None:
        return f"{row['blocked_by']}: {_stage(row['job'])}"
    return row["blocked_by"] or ""


def nothing_to_clean(answer: Json, *, rolled: bool) -> str:
    """Return why a requested clean does not start."""
    if answer["to_clean"]:
        return "nothing is dirty; expired records are removed next"
    if answer["obstacle"] is None:
        is_empty = not answer["size_bytes"]
        why = "it is empty" if is_empty else "no record was written since the last clean"
        return f"nothing to clean: {why}"
    text = str(answer["obstacle"])
    if answer["blocked_by"] == "active segment" and not rolled:
        text = f"nothing can be cleaned now. {text}"
    return text


def explanation_lines(answer: Json) -> list[str]:
    """Return the reasons, then the last state transitions."""
    first, *rest = answer["sentences"]
    lines = [first, *(f"  - {sentence}" for sentence in rest)]
    transitions = answer.get("transitions") or []
    if transitions:
        lines += ["", "Last transitions:"]
        lines += map(_transition_line, transitions[-10:])
    return lines


def _transition_line(entry: Json) -> str:
    reason = entry["reason"] or entry["details"].get("reason")
    event = re.sub(r"\B[A-Z]", r" \g<0>", entry["event"]).lower()
    event = event.replace("groups", "segment groups")
    return (
        f"  {local_time(entry['at_ms'])}  {event}: {entry['before']} -> {entry['after']}"
        f"{f' ({reason})' if reason else ''}"
    )


def estimate_lines(answer: Json, *, with_groups: bool) -> list[str]:
    """Return an estimate, a table of other slacks, and with `with_groups` one of all groups."""
    name = f"{answer['topic']}-{answer['partition']}"
    scope = "rewrites the whole log"
    if answer["selective"]:
        fates = [_fate(group) for group in answer["groups"]]
        removed = f" and removes {count}" if (count := fates.count("removes it")) else ""
        total = counted(len(fates), "segment group")
        scope = f"rewrites {fates.count('rewrites it')}{removed} of {total}"
    first = (
        f"{name}: the next clean {scope}. It reads {about_size(answer['read_bytes'])}, writes "
        f"{about_size(answer['written_bytes'])}, frees {about_size(answer['freed_bytes'])} and "
        f"takes about {about_span(int(1000 * answer['seconds']))}."
    )
    if not answer["read_bytes"] and not answer["freed_bytes"]:
        first = f"{name}: there is nothing to clean now."
    lines = [first]
    unmeasured = sum(group["size_bytes"] for group in answer["groups"] if not group["measured"])
    if unmeasured:
        lines.append(f"  No clean has read {about_size(unmeasured)} of it yet.")
    if answer["by_slack"]:
        table = [("SLACK", "READS", "WRITES", "FREES")]
        table += [
            (
                f"{row['slack']:g}" + (" *" if row["slack"] == answer["slack"] else ""),
                about_size(row["read_bytes"]),
                about_size(row["written_bytes"]),
                about_size(row["freed_bytes"]),
            )
            for row in answer["by_slack"]
        ]
        lines += ["", *columns(table, right={1, 2, 3})]
    if answer["by_dirty_ratio"]:
        lines += ["", *_ratio_lines(answer)]
    if with_groups:
        rows = [("OFFSETS", "SEGMENTS", "SIZE", "LIVE", "NEXT CLEAN")]
        for group in answer["groups"]:
            live = about_size(group["live_bytes"])
            rows.append(
                (
                    f"{group['base_offset']} to {group['next_offset'] - 1}",
                    str(group["segments"]),
                    about_size(group["size_bytes"]),
                    live if group["measured"] else f"about {live}",
                    _fate(group),
                )
            )
        lines += ["", *columns(rows, right={1, 2, 3})]
    return lines


def _ratio_lines(answer: Json) -> list[str]:
    """Return a table of what other dirty ratios cost."""
    table = [("DIRTY RATIO", "LOG UP TO", "CLEAN EVERY", "READS", "WRITES")]
    for row in answer["by_dirty_ratio"]:
        read, written = (
            "-" if count is None else about_size(count)
            for count in (row["read_bytes"], row["written_bytes"])
        )
        table.append(
            (
                f"{row['ratio']:g}" + (" *" if row["ratio"] == answer["dirty_ratio"] else ""),
                about_size(row["log_bytes"]),
                about_size(row["new_bytes"]),
                read,
                written,
            )
        )
    return columns(table, right={1, 2, 3, 4})


def survival_lines(name: str, answers: Sequence[Json]) -> list[str]:
    """Return a table of the records of these partitions that are alive, by age."""
    sums: dict[int, list[int]] = {}
    for row in (row for answer in answers for row in answer["survival"]):
        written_and_alive = sums.setdefault(row["age_ms"], [0, 0])
        written_and_alive[0] += row["written"]
        written_and_alive[1] += row["alive"]
    if not sums:
        return ["", f"{name}: no clean has counted live records yet."]
    table = [("AGE", "WRITTEN", "ALIVE", "SHARE")]
    for age_ms, (written, alive) in sorted(sums.items()):
        age = f"from {about_span(age_ms)}" if age_ms else "younger"
        table.append((age, f"{written:,}", f"{alive:,}", f"{alive / written:.1%}"))
    return ["", f"{name}: records by age, at the last clean", *columns(table, right={1, 2, 3})]


def _fate(group: Json) -> str:
    """Return what the next clean does with a group of segments."""
    if not group["rewritten"]:
        return "leaves it"
    return "rewrites it" if group["live_bytes"] else "removes it"


def history_lines(jobs: Sequence[Json]) -> list[str]:
    """Return a table of jobs."""
    if not jobs:
        return ["No clean has ended yet."]
    table = [("FINISHED", "PARTITION", "OUTCOME", "SECONDS", "BEFORE", "AFTER", "SAVED", "REASON")]
    for job in jobs:
        done = job["outcome"] in ("finished", "damaged")
        table.append(
            (
                local_time(job["finished_ms"]),
                f"{job['topic']}-{job['partition']}",
                job["outcome"],
                f"{job['seconds']:.1f}",
                about_size(job["bytes_before"]) if done else "-",
                about_size(job["bytes_after"]) if done else "-",
                f"{job['size_reduction_percent']:.0f}%" if done else "-",
                job["reason"],
            )
        )
    return columns(table, right={3, 4, 5, 6})


def clean_text(answer: Json) -> str:
    """Return the last line of `run --wait`."""
    name, job = f"{answer['topic']}-{answer['partition']}", answer["last_job"]
    if job is None or job["outcome"] != "finished":
        return f"{name} is clean below offset {answer['first_dirty_offset']}"
    return (
        f"{name} is clean below offset {answer['first_dirty_offset']}: "
        f"{about_size(job['bytes_before'])} became {about_size(job['bytes_after'])}, "
        f"{counted(job['records_before'], 'record')} became {job['records_after']:,}, "
        f"in {job['seconds']:.1f} s"
    )


def progress_text(status: Json, partition: Json) -> str:
    """Return one line on a running or queued job."""
    name = f"{partition['topic']}-{partition['partition']}"
    for worker in status["workers"]:
        job = worker["job"]
        if job and (job["topic"], job["partition"]) == (partition["topic"], partition["partition"]):
            return f"{name}: {_stage(job)}"
    if status["workers"] and not any(worker["ready"] for worker in status["workers"]):
        return f"{name}: the workers are {STARTING}"
    position = partition.get("queue_position")
    return f"{name}: {partition['state']}" + (f", {position}. in the queue" if position else "")


def _stage(job: Json) -> str:
    total = job["total_bytes"]
    share = f" {job['done_bytes'] / total:.0%} of {about_size(total)}" if total else ""
    return f"{job['stage'] or 'starting'}{share}, {job['seconds']:.0f} s"
