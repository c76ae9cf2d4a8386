"""Limits on requests by API: bytes of the frame, and rows in all its arrays together.

Both limits apply before any object is built. The broker checks the frame limit when it knows the
API key, before it receives the body (framing.py). The decoders count rows (table_compiler.py,
produce_codec.py, fetch_codec.py): each element of an array is a row, and so is each tagged field.
If an array announces more rows than are left, the request fails before its first row is built.

The limits follow from the largest requests of real clients: a request that names every partition of
the broker, each in its own topic, has two rows per partition.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from protocol.api import APIS, ApiKey

# Every API accepts frames up to this size: they fit into the first receive buffer.
SMALL_FRAME_BYTES: Final = 64 << 10
FRAME_BYTES: Final = 4 << 20  # 10,000 topics with names of 249 bytes, and room for their fields
# Requests with payloads of their own: assignments to thousands of members, metadata of commits,
# configurations of thousands of topics.
LARGE_FRAME_BYTES: Final = 16 << 20
ROWS: Final = 50_000
ROWS_PER_PARTITION: Final = 3  # a partition, its topic, and one more
BYTES_PER_ROW: Final = FRAME_BYTES // ROWS
# Requests that name one thing: a member, a producer, this broker.
FEW_ROWS: Final = 1_000

# Up to this many rows, Produce and Fetch are decoded (0.1 ms) and handled (2 ms) without yielding
# to the event loop. Larger requests are decoded in slices and handled in turns.
WHOLE_ROWS_MAX: Final = 256
# Kafka's clients send none, or one or two (KIP-482); one section is skipped without a pause.
TAGS_PER_SECTION_MAX: Final = 64
STRING_BYTES_MAX: Final = 32_767  # as in Kafka, also for compact strings
# A topic has about forty keys. A turn parses the settings of one resource, which takes 2 ms.
SETTINGS_PER_RESOURCE_MAX: Final = 1_000

_LARGE: Final = frozenset(
    (
        ApiKey.JOIN_GROUP,
        ApiKey.SYNC_GROUP,
        ApiKey.OFFSET_COMMIT,
        ApiKey.CREATE_TOPICS,
        ApiKey.DESCRIBE_CONFIGS,
        ApiKey.ALTER_CONFIGS,
        ApiKey.INCREMENTAL_ALTER_CONFIGS,
    )
)
_SMALL: Final = frozenset(
    (
        ApiKey.API_VERSIONS,
        ApiKey.DESCRIBE_CLUSTER,
        ApiKey.HEARTBEAT,
        ApiKey.INIT_PRODUCER_ID,
        ApiKey.ADD_OFFSETS_TO_TXN,
        ApiKey.END_TXN,
        ApiKey.LIST_GROUPS,
        ApiKey.SASL_HANDSHAKE,
        ApiKey.SASL_AUTHENTICATE,
        ApiKey.RENEW_DELEGATION_TOKEN,
        ApiKey.EXPIRE_DELEGATION_TOKEN,
        ApiKey.UPDATE_FEATURES,
    )
)
# Few but large rows: each assignor that a member supports, with its subscription.
_FEW_ROWS: Final = frozenset((ApiKey.JOIN_GROUP,))


class RequestLimit(NamedTuple):
    """The limits of one API."""

    frame_bytes: int
    rows: int


_UNKNOWN: Final = RequestLimit(SMALL_FRAME_BYTES, FEW_ROWS)


class RequestLimits:
    """The limits of every API, for a broker with a given maximum of partitions."""

    def __init__(self, max_request_bytes: int, max_partitions: int) -> None:
        rows = max(ROWS, ROWS_PER_PARTITION * max_partitions)
        self._limits: Final[Mapping[int, RequestLimit]] = {
            key: _limit(ApiKey(key), rows, max_request_bytes) for key in APIS
        }

    def of(self, api_key: int) -> RequestLimit:
        """Return the limit of an API; for an unknown API, the limit of small requests."""
        return self._limits.get(api_key, _UNKNOWN)


def _limit(key: ApiKey, rows: int, max_request_bytes: int) -> RequestLimit:
    if key is ApiKey.PRODUCE:
        return RequestLimit(max_request_bytes, rows)
    if key in _SMALL:
        return RequestLimit(SMALL_FRAME_BYTES, FEW_ROWS)
    frame_bytes = max(LARGE_FRAME_BYTES if key in _LARGE else FRAME_BYTES, BYTES_PER_ROW * rows)
    return RequestLimit(min(frame_bytes, max_request_bytes), FEW_ROWS if key in _FEW_ROWS else rows)
