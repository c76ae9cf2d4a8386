"""The rules of `promtool check metrics` (promlint of client_golang), for where promtool is missing.

A complaint is "family: reason". Families of type untyped are excused from the rules on suffixes,
as promlint excuses them.
"""

import re
from collections.abc import Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

ABBREVIATED = {"s", "ms", "us", "ns", "sec", "b", "kb", "mb", "gb", "tb", "pb", "m", "h", "d"}
SCALED = {
    "milliseconds", "microseconds", "nanoseconds", "minutes", "hours", "days", "weeks",
    "kilobytes", "megabytes", "gigabytes", "terabytes", "kibibytes", "mebibytes", "gibibytes",
    "bits", "millimeters", "kilometers", "milligrams", "kilograms", "fahrenheit", "kelvins",
}  # fmt: skip
TYPE_NAMES = {"counter", "gauge", "histogram", "summary", "untyped"}
CAMEL_CASE = re.compile(r"[a-z][A-Z]")


def complaints(text: str) -> set[str]:
    """What promtool would say of an answer of /metrics."""
    results: set[str] = set()
    seen: set[tuple[str, tuple[tuple[str, str], ...]]] = set()
    for family in text_string_to_metric_families(text):
        name = family.name + ("_total" if family.type == "counter" else "")
        results |= {f"{name}: {reason}" for reason in _of_family(family, name)}
        for sample in family.samples:
            series = sample.name, tuple(sorted(sample.labels.items()))
            if series in seen:
                results.add(f"{name}: a series twice")
            seen.add(series)
    return results


def _of_family(family: Metric, name: str) -> Iterator[str]:
    words = set(name.lower().split("_"))
    labels = {label for sample in family.samples for label in sample.labels}
    if not family.documentation.strip():
        yield "no help text"
    if words & ABBREVIATED:
        yield "abbreviated unit"
    if words & SCALED:
        yield "not a base unit"
    if words & TYPE_NAMES & {family.type}:
        yield "its type in its name"
    if CAMEL_CASE.search(name) or any(CAMEL_CASE.search(label) for label in labels):
        yield "camelCase"
    if ":" in name:
        yield "a colon"
    if family.type == "unknown":
        return
    if family.type == "counter" and not all(s.name.endswith("_total") for s in family.samples):
        yield "a counter without _total"
    if family.type != "counter" and name.endswith("_total"):
        yield "_total of what is no counter"
    if family.type not in ("histogram", "summary") and name.endswith(("_count", "_sum")):
        yield "the suffix of a histogram"
    if family.type != "histogram" and (name.endswith("_bucket") or "le" in labels):
        yield "a bucket outside of a histogram"
    if family.type != "summary" and "quantile" in labels:
        yield "a quantile outside of a summary"
