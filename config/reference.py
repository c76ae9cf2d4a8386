"""docs/reference/configuration.md, written from the tables and from config/default.yaml.

`make docs` prints it into the file; a test keeps the file current.
"""

import sys
from collections.abc import Iterator

from config.broker_keys import BROKER_KEYS, BrokerKey
from config.loader import default_text
from config.settings import Settings
from config.topic_keys import LONG_MAX, TOPIC_KEYS, Effect, TopicKey
from config.units import format_size

_INTRODUCTION = """\
# Configuration

This page is generated (`make docs`); edit `config/` instead.

Settings come from four places. The first that has a value wins:

1. **dynamic**: what a client set with AlterConfigs (`kafka-configs`, any admin client). Kept in the
   data directories, survives restarts. Broker-wide dynamic values stand below a topic's YAML;
2. **the topic's YAML**: `topics:` in the settings file;
3. **`topic_defaults`** in the settings file;
4. **built-in defaults**, listed here.

Flags of `varve serve` win over the file: `--listen` over `listeners`, `--data` over `log_dirs`,
`--advertise` and `--http` over their namesakes. `varve check-config FILE` says what is wrong with
a file, with line and key, without starting anything.

A topic that is named in the file is created at start. The file never deletes a topic and never
takes partitions away.

## Settings file

Every key, with its default. A file of your own needs only the keys it changes.

```yaml
"""

_TOPIC_KEYS = """\
## Topic keys

Under `topic_defaults:` and `topics:` in the file, and in CreateTopics and AlterConfigs. Names,
types, ranges and defaults are Kafka's; keys under `varve.` are ours. In the file, sizes and
durations may carry a unit (`64MiB`, `7d`); clients send plain numbers, as to Kafka.

### Defaults of compacted topics

A topic whose policy contains `compact` has two built-in defaults of its own, because with Kafka's
a small or quiet topic never shrinks: only closed segments are compacted, and a segment of 1 GiB or
7 days stays open for a long time.

- `segment.bytes` is 64 MiB (or `max.message.bytes`, where that is larger).
- `max.compaction.lag.ms` is one day after `min.compaction.lag.ms`. It closes the active segment and
  makes its partition due after that time, however little was written and even if nothing more is.
  A day bounds the price: a partition with any change is rewritten at most once a day for this
  reason (6 MB/s for 500 GB), and it matches the default of `delete.retention.ms`.

DescribeConfigs shows them as built-in defaults, which they are; set the keys to have other values.

"""

_BROKER_KEYS = """\
## Kafka's broker keys

What DescribeConfigs shows of a broker, under Kafka's names, for tools that look there. Those marked
*dynamic* can be altered while the broker runs; the others follow the settings file. Broker-wide
defaults of topic keys (the synonyms above) are dynamic, too.

"""


def page() -> str:
    """The whole page."""
    return "".join(_parts())


def _parts() -> Iterator[str]:
    yield _INTRODUCTION
    yield default_text()
    yield "```\n\n"
    yield _TOPIC_KEYS
    for title, effect in (
        ("### Obeyed", Effect.FULL),
        ("### Accepted, without effect on a single node", Effect.NONE),
    ):
        yield f"{title}\n\n| key | broker-wide name | type | default | meaning |\n"
        yield "|---|---|---|---|---|\n"
        yield from (_topic_row(key) for key in TOPIC_KEYS.values() if key.effect is effect)
        yield "\n"
    yield _BROKER_KEYS
    yield "| key | type | default | | meaning |\n|---|---|---|---|---|\n"
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
