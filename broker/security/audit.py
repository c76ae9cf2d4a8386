"""The audit log: structured events of the logger `audit`, of denials and of administrative changes.

An event says who (principal), from where (host), what, and the result. Events contain names, never
passwords, and no value of a setting whose name says that it is a secret. A client can cause denials
and failures at will, so each principal has a limited rate of these lines. Equal denials are counted
(RateLimitedLogger), so a principal cannot hide one denial behind many others that are equal.
"""

import re
from typing import Final

import structlog

from broker.logging import AUDIT, RateLimitedLogger
from broker.security.acls import Operation, ResourceType
from broker.security.principal import ANONYMOUS, Principal

TEXT_CHARACTERS_MAX: Final = 300  # of a name or value in an event
HIDDEN: Final = "(hidden)"
_SENSITIVE: Final = re.compile(r"password|secret|token|credential|jaas|\.key$", re.IGNORECASE)

logger = structlog.get_logger(AUDIT)
_limited: Final = RateLimitedLogger(logger)


def log_denied(
    principal: Principal, host: str, operation: Operation, resource_type: ResourceType, name: str
) -> None:
    """Write that a client was denied an operation."""
    _limited.info_unless_repeated(
        "operation denied",
        subject=_subject_of(principal, host),
        principal=str(principal),
        host=host,
        operation=operation.name,
        resource_type=resource_type.name,
        resource=shorten(name),
    )


def log_request_denied(
    principal: Principal, host: str, action: str, target: str, reason: str
) -> None:
    """Write that an HTTP request was denied, because of its sender, its form or a permission."""
    _limited.info_unless_repeated(
        "request denied",
        subject=_subject_of(principal, host),
        principal=str(principal),
        host=host,
        action=action,
        resource=target,
        reason=reason,
    )


def _subject_of(principal: Principal, host: str) -> str:
    return host if principal == ANONYMOUS else str(principal)


def write_repeated() -> None:
    """Write the numbers of equal denials that were not written yet, before the broker ends."""
    _limited.write_repeated()


def log_change(
    principal: Principal,
    host: str,
    change: str,
    result: str,
    details: dict[str, object],
    *,
    is_limited: bool = False,
) -> None:
    """Write an administrative change: the name of its API, its result (NONE or an error), details.

    The lines of changes are not limited: the changes themselves are, or need the permission to
    alter (broker/topics/change_pauses.py). `is_limited` if neither is so.
    """
    fields = {"principal": str(principal), "host": host, "change": change, **details}
    subject = str(principal)
    if result != "NONE":
        _limited.info("administrative change failed", subject=subject, reason=result, **fields)
    elif is_limited:
        _limited.info("administrative change", subject=subject, **fields)
    else:
        logger.info("administrative change", **fields)


def shorten(text: str) -> str:
    """Return a text that a client chose, cut to a length that a log line may have."""
    return text[:TEXT_CHARACTERS_MAX]


def mask(name: str, value: str | None) -> str | None:
    """Return the value of a setting, unless its name says that it is a secret."""
    if value is None:
        return None
    return HIDDEN if is_secret(name) else shorten(value)


def is_secret(name: str) -> bool:
    """Return whether the name of a setting says that it is a secret."""
    return _SENSITIVE.search(name) is not None
