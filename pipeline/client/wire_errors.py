"""The errors of the client, besides those of a connection (protocol/client/connection.py)."""

from collections.abc import Iterable
from typing import Final

from protocol.client.connection import BrokerRefusedError, WireError
from protocol.errors import ErrorCode
from storage.model import TopicPartition

# The end of the message of a DataLossError, for users of format("varve"); jobs do not show it.
DATA_LOSS_HINT: Final = " Set failOnDataLoss=false to continue with the remaining records"


class UnreachableBrokerError(WireError):
    """No broker answered in time; the message lists the attempts."""


class UnknownTopicError(WireError):
    """Topics or partitions that do not exist."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(sorted(names))
        super().__init__(f"does not exist: {', '.join(self.names)}")


class OffsetsGoneError(WireError):
    """An offset before the log start offset or after the log end offset."""

    def __init__(self, partition: TopicPartition, offset: int, first: int, end: int) -> None:
        super().__init__(f"{partition}: offset {offset} is not in the log [{first}, {end})")
        self.partition = partition
        self.offset = offset
        self.log_start_offset = first
        self.end_offset = end


class RetriableError(Exception):
    """A transient error; `cause` is raised if it persists."""

    def __init__(self, cause: WireError) -> None:
        super().__init__(str(cause))
        self.cause = cause


class ThrottledError(Exception):
    """A request that a quota left without a result; it may be repeated after `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"throttled by a quota for {seconds:g} s")
        self.seconds = seconds


def check(subject: str, code: int) -> None:
    """Raise the error of an error code; do nothing for NONE."""
    if code == ErrorCode.NONE:
        return
    error = BrokerRefusedError(subject, code)
    if isinstance(error.code, ErrorCode) and error.code.retriable:
        raise RetriableError(error)
    raise error


def brief(error: Exception) -> str:
    """Return the message of an error, or its type name if the message is empty."""
    return str(error) or type(error).__name__
