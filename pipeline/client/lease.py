"""The client side of a remote compaction: open, renew, submit, adopt or abandon its lease.

Rules
- A thread renews the lease every third of its lifetime. It keeps trying while the broker is
  unreachable. Once the lease has ended, or must have ended, `check` and all later calls raise.
- Leaving the block without adoption abandons the lease: the broker removes its files.
- Every error is a LeaseRequestError with its exit code. A refused request changes nothing.
"""

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Final, TypeVar

from admin.client import ApiClient, ApiRefusedError, UnreachableError
from cleaner.job import CleanedGroup, CleanJob, CleanReport
from cleaner.remote_compaction import (
    COMPACTIONS_PATH,
    AdoptResult,
    LeasePlan,
    MalformedPlanError,
    OutputManifest,
    Purpose,
    encode_manifest,
    parse_plan,
    parse_result,
)
from config import exit_codes

T = TypeVar("T")

TTL_SECONDS: Final = 120
LEFT_SECONDS: Final = 3600  # for output that is to be adopted later
RENEWALS: Final = 3  # in the lifetime of a lease
RETRY_SECONDS: Final = 1.0  # pause after a failed request
NOT_THERE: Final = 404
_LOST: Final = ("stale", "expired", "abandoned")  # states of a partition
UNREACHABLE_SECONDS: Final = 60.0  # how long to repeat a request while no broker answers


class LeaseRequestError(Exception):
    """The remote compaction cannot continue; `code` is one of config/exit_codes.py."""

    code = exit_codes.FAILED


class LeaseLostError(LeaseRequestError):
    """The lease ended, or the log changed. Nothing was published: it is safe to try again."""

    code = exit_codes.STALE


class BrokerUnreachableError(LeaseRequestError):
    """The broker did not answer."""

    code = exit_codes.UNREACHABLE


def with_retries(ask: Callable[[], T]) -> T:
    """Repeat a request for up to a minute while no broker answers: it may be restarting.

    Raises what `ask` raises.
    """
    until = time.monotonic() + UNREACHABLE_SECONDS
    while True:
        try:
            return ask()
        except UnreachableError:
            if time.monotonic() >= until:
                raise
        except ApiRefusedError as error:
            if error.status != 503 or time.monotonic() >= until:
                raise
        time.sleep(RETRY_SECONDS)


def _as_lease_error(error: ApiRefusedError | UnreachableError) -> LeaseRequestError:
    if isinstance(error, UnreachableError):
        return BrokerUnreachableError(str(error))
    code = exit_codes.of_status(error.status)
    kind = LeaseLostError if code == exit_codes.STALE else LeaseRequestError
    lease_error = kind(str(error))
    lease_error.code = code
    return lease_error


class LeaseClient:
    """Opens leases at one broker."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client.below(COMPACTIONS_PATH)

    def open(
        self,
        topic: str,
        partitions: Sequence[int] | None = None,
        *,
        purpose: Purpose = Purpose.COMPACT,
        roll: bool = False,
        ttl_seconds: int = TTL_SECONDS,
    ) -> "Lease":
        """Lease partitions of a topic, all of them if none are named.

        `roll` closes the active segments first. Raises LeaseLostError if one of them is leased
        already (then none is leased), LeaseRequestError, BrokerUnreachableError.
        """
        body: dict[str, object] = {
            "topic": topic,
            "purpose": purpose.value,
            "roll": roll,
            "ttl_seconds": ttl_seconds,
        }
        if partitions is not None:
            body["partitions"] = list(partitions)
        try:
            answer = self._client.post("", body)
        except (ApiRefusedError, UnreachableError) as error:
            if isinstance(error, ApiRefusedError) and error.status == NOT_THERE:
                # The topic or partition does not exist: trying again does not help.
                raise LeaseRequestError(str(error)) from error
            raise _as_lease_error(error) from error
        try:
            plan = parse_plan(answer)
        except MalformedPlanError as error:
            raise LeaseRequestError(f"the broker's answer is not a lease plan: {error}") from error
        lease = Lease(self._client, plan, ttl_seconds)
        if not plan.partitions:  # there is nothing to do, and no lease
            lease.end()
        return lease

    def reopen(self, compaction_id: str) -> "Lease":
        """Return a lease that `Lease.leave` kept, to adopt or abandon it. Its plan is empty."""
        plan = LeasePlan(compaction_id, "", Purpose.COMPACT, 0, 0, "", ())
        return Lease(self._client, plan, TTL_SECONDS)


class Lease:
    """The lease of a remote compaction; a context manager made by LeaseClient.open."""

    def __init__(self, client: ApiClient, plan: LeasePlan, ttl_seconds: int) -> None:
        self.plan = plan
        self._client = client.below(f"{COMPACTIONS_PATH}/{plan.compaction_id}")
        self._files = client.with_token(plan.token).below(
            f"{COMPACTIONS_PATH}/{plan.compaction_id}"
        )
        self._ttl_seconds = ttl_seconds
        self._lost: LeaseRequestError | None = None
        self._is_over = threading.Event()
        self._renewal_thread = threading.Thread(
            target=self._keep_alive, name=f"lease-{plan.compaction_id}", daemon=True
        )
        self._renewal_thread.start()

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_over(self) -> bool:
        """Return whether the remote compaction has ended."""
        return self._is_over.is_set()

    def check(self) -> None:
        """Raise LeaseLostError if the lease has ended; call this between stages."""
        if self._lost is not None:
            raise self._lost

    def confirm(self) -> None:
        """Ask the broker whether every partition is still leased; renew the lease if so.

        A task may notice the end of a lease long before the next renewal. Raises LeaseLostError,
        LeaseRequestError, BrokerUnreachableError.
        """
        self.check()
        if not self.plan.partitions:
            return
        try:
            status = self._client.post("/renew", {"ttl_seconds": self._ttl_seconds})
        except (ApiRefusedError, UnreachableError) as error:
            raise _as_lease_error(error) from error
        for row in status["partitions"]:
            if row["state"] in _LOST:
                where = f"{self.plan.topic}-{row['partition']}"
                raise LeaseLostError(f"the lease of {where} has ended: {row['reason']}; try again")

    def source(self, kind: str) -> dict[str, Any]:
        """Return the transport descriptor of this lease for tasks: kind "disk" or "http"."""
        if kind == "disk":
            return {"kind": "disk"}
        assert kind == "http", kind
        tls = self._client.tls
        return {
            "kind": "http",
            "url": self._client.url,
            "tls": "" if tls is None else json.dumps(asdict(tls.public_part)),
            "compaction_id": self.plan.compaction_id,
            "token": self.plan.token,
        }

    def submit(
        self,
        job: CleanJob,
        groups: Sequence[CleanedGroup],
        folders: Sequence[str],
        report: CleanReport,
        *,
        engine: str = "",
    ) -> None:
        """Upload the manifest of a partition whose outputs are delivered.

        Raises LeaseRequestError.
        """
        self.check()
        (topic_id,) = (
            planned.topic_id
            for planned in self.plan.partitions
            if planned.job.partition == job.partition
        )
        manifest = OutputManifest(
            compaction_id=self.plan.compaction_id,
            partition=job.partition,
            topic_id=topic_id,
            generation=job.generation,
            end_offset=job.end_offset,
            folders=tuple(folders),
            groups=tuple(groups),
            report=report,
            engine=engine,
        )
        data = encode_manifest(manifest)
        path = f"/partitions/{job.partition.partition}/manifest"
        try:
            with_retries(lambda: self._files.upload(path, data, len(data), {}))
        except (ApiRefusedError, UnreachableError) as error:
            raise _as_lease_error(error) from error

    def adopt(self, partition: int | None = None) -> list[AdoptResult]:
        """Have the broker check and publish the submitted output of one partition, or of all.

        Return a result for each partition, refusals too. Raises LeaseRequestError.
        """
        body = {} if partition is None else {"partition": partition}
        try:
            while True:
                answer = with_retries(lambda: self._client.post("/adopt", body))
                if answer["done"]:
                    return [parse_result(result) for result in answer["results"]]
        except (ApiRefusedError, UnreachableError) as error:
            raise _as_lease_error(error) from error
        except (MalformedPlanError, KeyError, TypeError) as error:
            reason = f"the broker's answer is not a list of adoption results: {error!r}"
            raise LeaseRequestError(reason) from error

    def status(self) -> dict[str, Any]:
        """Return the broker's status of the remote compaction. Raises LeaseRequestError."""
        try:
            return self._client.get("")
        except (ApiRefusedError, UnreachableError) as error:
            raise _as_lease_error(error) from error

    def abandon(self) -> None:
        """Abandon the lease, if it has not ended; the broker removes its files.

        Raises BrokerUnreachableError: then the lease expires by itself.
        """
        self._is_over.set()
        try:
            self._client.delete("")
        except ApiRefusedError as error:
            if exit_codes.of_status(error.status) != exit_codes.STALE:
                raise _as_lease_error(error) from error
        except UnreachableError as error:
            raise _as_lease_error(error) from error

    def end(self) -> None:
        """Stop renewing a lease that has no partitions."""
        self._is_over.set()

    def leave(self, ttl_seconds: int = LEFT_SECONDS) -> None:
        """Stop renewing; the lease can be adopted until `ttl_seconds` have passed.

        Raises LeaseRequestError.
        """
        self.check()
        body = {"ttl_seconds": ttl_seconds}
        self._is_over.set()
        # A renewal that is under way would shorten the lease again.
        self._renewal_thread.join(UNREACHABLE_SECONDS)
        try:
            with_retries(lambda: self._client.post("/renew", body))
        except (ApiRefusedError, UnreachableError) as error:
            with suppress(LeaseRequestError):
                self.abandon()
            raise _as_lease_error(error) from error

    def close(self) -> None:
        """Stop renewing the lease, and abandon it if it has not ended."""
        if not self._is_over.is_set():
            with suppress(LeaseRequestError):  # then the lease ends by itself
                self.abandon()
        self._is_over.set()
        self._renewal_thread.join(timeout=RETRY_SECONDS)

    def _keep_alive(self) -> None:
        renewed = time.monotonic()
        pause = self._ttl_seconds / RENEWALS
        while not self._is_over.wait(pause):
            try:
                self._client.post("/renew", {"ttl_seconds": self._ttl_seconds})
            except (ApiRefusedError, UnreachableError) as error:
                lease_error = _as_lease_error(error)
                # A restarted broker resumes the lease with its full lifetime.
                is_late = time.monotonic() - renewed > self._ttl_seconds + UNREACHABLE_SECONDS
                if is_late or isinstance(lease_error, LeaseLostError):
                    self._lost = lease_error
                    return
                pause = RETRY_SECONDS
            else:
                renewed, pause = time.monotonic(), self._ttl_seconds / RENEWALS
