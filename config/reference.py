"""Generate docs/reference/configuration.md from the tables and config/default.yaml.

`make docs` writes the file; a test fails if it is out of date.
"""

import sys
from collections.abc import Iterator

from config.broker_keys import BROKER_KEYS, BrokerKey
from config.loader import default_text
from config.settings import Settings
from config.topics.keys import LONG_MAX, TOPIC_KEYS, Effect, TopicKey
from config.units import format_size

_INTRODUCTION = """\
# Configuration

This page is generated (`make docs`); edit `config/` instead.

A topic config can have values from five sources. The first of them that has a value applies:

1. **dynamic topic config**: a client sets it with AlterConfigs (`kafka-configs`, any admin client);
   the broker stores it in the data directories, so it survives restarts;
2. **`topics:`** in the settings file;
3. **dynamic broker config**: a client sets it for the whole broker; stored in the same way;
4. **`topic_defaults:`** in the settings file;
5. **built-in default**, listed on this page.

Flags of `varve serve` override the file: `--listen` overrides `listeners`, `--data` overrides
`log_dirs`, `--advertise` and `--http` override the settings of the same name. `varve check-config
FILE` reports each error of a file with its line and setting, and starts no broker.

The broker creates the topics of the file at its start. It never deletes a topic or a partition
because of the file. If the broker starts without the file, or the file no longer names a topic, the
topic lacks the `cleanup.policy`, `retention.ms` and `varve.view` of the file. If the built-in
defaults would delete records or a compacted view that those three kept, the broker logs a warning.
It then neither cleans nor expires the topic, and keeps its view on disk without serving it, until
the file names the topic again, or somebody sets the missing config. A new `cleanup.policy` also
stands for the missing `retention.ms`, but not for `varve.view`.

## Settings file

Every setting with its default. Your own file needs only those that it changes.

```yaml
"""

_TOPIC_KEYS = """\
## Topic configs

Set them under `topic_defaults:` and `topics:` in the settings file, or with CreateTopics and
AlterConfigs. Names, types, ranges and defaults are those of Kafka; the configs under `varve.` are
Varve's own. In the settings file, sizes and durations can have a unit (`64MiB`, `7d`); clients
send plain numbers, as to Kafka.

### Defaults of compacted topics

Compacted topics have two built-in defaults that differ from Kafka's. With Kafka's defaults a small
or quiet topic never shrinks: the cleaner compacts closed segments only, and a segment of 1 GiB or
7 days stays open for a long time.

- `segment.bytes` is 64 MiB (or `max.message.bytes`, if that is larger).
- `max.compaction.lag.ms` is one day more than `min.compaction.lag.ms`. After this time the cleaner
  rolls the active segment and cleans the partition, however little was written. One day limits
  the cost: the cleaner rewrites a partition at most once a day for this reason (6 MB/s for 500 GB).
  One day is also the default of `delete.retention.ms`.

DescribeConfigs shows both as built-in defaults. Set the configs to use other values.

"""

_BROKER_KEYS = """\
## Broker configs

DescribeConfigs shows these configs of a broker under Kafka's names, for tools that read them.
Clients can change the *dynamic* ones while the broker runs; the others follow the settings file.
The broker-wide defaults of topic configs (second column above) are dynamic as well.

"""


def page() -> str:
    """Return the text of the page."""
    return "".join(_parts())


def _parts() -> Iterator[str]:
    yield _INTRODUCTION
    yield default_text()
    yield "```\n\n"
    yield _TOPIC_KEYS
    for title, effect in (
        ("### Configs with an effect", Effect.FULL),
        ("### Configs without an effect on a single node", Effect.NONE),
    ):
        yield f"{title}\n\n| config | broker-wide name | type | default | meaning |\n"
        yield "|---|---|---|---|---|\n"
        yield from (_topic_row(key) for key in TOPIC_KEYS.values() if key.effect is effect)
        yield "\n"
    yield _BROKER_KEYS
    yield "| config | type | default | | meaning |\n|---|---|---|---|---|\n"
    synonyms = {key.synonym for key in TOPIC_KEYS.values()}
    settings = Settings()
    for key in BROKER_KEYS.values():
        if key.name not in synonyms:
            yield _broker_row(key, settings)


def _topic_row(key: TopicKey) -> str:
    default = _shown(key.default, key.unit)
    if key.compact_default is not None:
        default += f"; compacted: {_shown(key.compact_default, key.unit)}"
    kind = key.kind.name.lower() + _range(key)
    synonym = "" if key.synonym == key.name else f"`{key.synonym}`"
    return f"| `{key.name}` | {synonym} | {kind} | {default} | {key.text} |\n"


def _broker_row(key: BrokerKey, settings: Settings) -> str:
    value = key.value(settings)
    shown = f"`{value}`" if value else "empty"
    dynamic = "dynamic" if key.dynamic else ""
    return f"| `{key.name}` | {key.kind.name.lower()} | {shown} | {dynamic} | {key.text} |\n"


def _range(key: TopicKey) -> str:
    if key.choices:
        return ": " + ", ".join(f"`{choice}`" for choice in key.choices)
    if key.minimum is not None and key.maximum is not None:
        return f", {key.minimum:.0f} to {key.maximum:.0f}"
    return "" if key.minimum is None else f", at least {key.minimum:.0f}"


def _shown(value: str, unit: str) -> str:
    if value == "":
        return "empty"
    if value == str(LONG_MAX):
        return "unlimited"
    if unit == "bytes" and format_size(int(value)) != value:
        return f"`{value}` ({format_size(int(value))})"
    if unit == "ms" and int(value) > 0 and int(value) % 3_600_000 == 0:
        hours = int(value) // 3_600_000
        return f"`{value}` ({hours} h)" if hours % 24 else f"`{value}` ({hours // 24} d)"
    return f"`{value}`"


if __name__ == "__main__":
    sys.stdout.write(page())
