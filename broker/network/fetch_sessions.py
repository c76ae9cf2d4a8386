"""Incremental fetch sessions (KIP-227). Pure: time is an argument.

Rules. A client gets a session with a full fetch. Later requests contain only changes, and responses
contain only partitions with news: records, an error, a moved high watermark or log start offset. A
partition that returned records moves to the end of the order, so that it cannot starve the others.
A session belongs to its principal: for others it does not exist.

The cache is bounded. A new session in a full cache takes the place of
1. the least recently used session, if it was not used for EVICT_AFTER_SECONDS;
2. a session of the principal that has most, if that has FAR_MORE than the new session's principal,
   so that no principal keeps the others out.
Otherwise the client gets no session, which the protocol allows.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from random import Random, SystemRandom

from protocol.errors import ErrorCode
from protocol.fetch_codec import FetchPartition
from protocol.produce_codec import TopicRef

MAX_SESSIONS = 1000  # Kafka's max.incremental.fetch.session.cache.slots
# A session is freed at once, which takes 3 ms for so many partitions. A client with more of them
# gets no session, and names all partitions in each fetch.
MAX_SESSION_PARTITIONS = 20_000
# In all sessions: about 20 MB. The collector of cyclic garbage visits the request for each.
MAX_ALL_PARTITIONS = 100_000
EVICT_AFTER_SECONDS = 120.0  # Kafka's min.incremental.fetch.session.eviction.ms
FAR_MORE = 2  # sessions, or partitions in sessions: more than twice as many
INITIAL_EPOCH = 0
FINAL_EPOCH = -1
MAX_EPOCH = 2**31 - 1


PartitionKey = tuple[TopicRef, int]  # topic name or id, and partition index
Targets = dict[PartitionKey, FetchPartition]  # in the order in which they are served


class FetchSessionError(Exception):
    """The session or a topic is invalid: the response contains `code` and nothing else."""

    def __init__(self, code: ErrorCode) -> None:
        super().__init__(code.name)
        self.code = code


@dataclass(slots=True)
class FetchSession:
    """The partitions that a client fetches, in the order in which they are served."""

    session_id: int
    owner: Hashable  # the principal
    by_id: bool  # topics are named by id (Fetch v13+)
    epoch: int = 1
    used_at: float = 0.0
    targets: Targets = field(default_factory=dict)
    room: int = 0  # partitions that count for MAX_ALL_PARTITIONS; it has no more of them
    adding: int = 0  # at most so many more, by requests that are being handled in turns
    # High watermark and log start offset in the last response that contained the partition. They
    # are plain tuples: the collector of cyclic garbage does not visit tuples of numbers.
    sent: dict[PartitionKey, tuple[int, int]] = field(default_factory=dict)

    def update(self, targets: Targets, forgotten: Iterable[PartitionKey]) -> None:
        """Apply the changes of an incremental request."""
        self.targets.update(targets)
        for key in forgotten:
            self.targets.pop(key, None)
            self.sent.pop(key, None)

    def added(self, targets: int) -> None:
        """Release the reservation of targets that FetchSessions.resume made for this request."""
        self.adding -= targets

    def needs_response(
        self, key: PartitionKey, *, records: bool, error: bool, high_watermark: int, log_start: int
    ) -> bool:
        """Return whether an incremental response contains this partition; record its offsets."""
        is_target = key in self.targets
        sent = self.sent.get(key)
        if sent is None and not is_target:
            return True
        offsets = high_watermark, log_start
        # The next response without an error must contain the partition again.
        self.sent[key] = (-1, -1) if error else offsets
        if records and is_target:
            self.targets[key] = self.targets.pop(key)
        return records or error or sent != offsets


@dataclass(slots=True)
class _Owner:
    """The sessions of one principal: counted here, because an eviction may follow many others."""

    sessions: dict[int, FetchSession] = field(default_factory=dict)  # least recently used first
    room: int = 0  # of these sessions


class FetchSessions:
    """All fetch sessions of this broker."""

    def __init__(self, max_sessions: int = MAX_SESSIONS, random: Random | None = None) -> None:
        self._sessions: dict[int, FetchSession] = {}  # least recently used first
        self._owners: dict[Hashable, _Owner] = {}
        self._max_sessions = max_sessions
        self._random = random or SystemRandom()  # no client may guess another's id
        self._room = 0  # of all sessions
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def partitions(self) -> int:
        """Return the number of partitions in all sessions."""
        return sum(len(session.targets) for session in self._sessions.values())

    def full(
        self,
        session_id: int,
        epoch: int,
        targets: Targets,
        *,
        by_id: bool,
        owner: Hashable,
        now: float,
    ) -> FetchSession | None:
        """End the session of a full fetch and return a new one, None if it gets none.

        The session owns `targets` from now on.
        """
        ended = self._sessions.get(session_id)
        if ended is not None and ended.owner == owner:
            self.end(ended)
        if epoch == FINAL_EPOCH or not targets or len(targets) > MAX_SESSION_PARTITIONS:
            return None
        if not self._has_room(owner, len(targets)):
            return None
        if len(self._sessions) >= self._max_sessions and not (
            self._evict_idle(now) or self._evict_excess(owner, 1, lambda each: len(each.sessions))
        ):
            return None
        session = FetchSession(self._take_id(), owner, by_id, used_at=now, targets=targets)
        self._sessions[session.session_id] = session
        self._owners.setdefault(owner, _Owner()).sessions[session.session_id] = session
        self._add_room(session, len(targets))
        return session

    def incremental(
        self,
        session_id: int,
        epoch: int,
        targets: Targets,
        forgotten: Iterable[PartitionKey],
        *,
        by_id: bool,
        owner: Hashable,
        now: float,
    ) -> FetchSession:
        """Return the updated session of an incremental fetch. Raises FetchSessionError."""
        session = self.resume(session_id, epoch, len(targets), by_id=by_id, owner=owner, now=now)
        session.update(targets, forgotten)
        session.added(len(targets))
        return session

    def resume(
        self, session_id: int, epoch: int, added: int, *, by_id: bool, owner: Hashable, now: float
    ) -> FetchSession:
        """Return the session of an incremental fetch; the caller updates it, then calls `added`.

        The request adds at most `added` targets. Raises FetchSessionError for an unknown session or
        epoch, and if there is no room: then the client sends a full fetch.
        """
        session = self._sessions.get(session_id)
        if session is None or session.owner != owner:
            raise FetchSessionError(ErrorCode.FETCH_SESSION_ID_NOT_FOUND)
        if session.epoch != epoch:
            raise FetchSessionError(ErrorCode.INVALID_FETCH_SESSION_EPOCH)
        if session.by_id != by_id:
            raise FetchSessionError(ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR)
        partitions = len(session.targets) + session.adding + added
        if partitions > MAX_SESSION_PARTITIONS:
            raise FetchSessionError(ErrorCode.INVALID_FETCH_SESSION_EPOCH)
        # Some of the targets may be there already, so a session may get twice its room.
        more = partitions - session.room
        if more > 0:
            if not self._has_room(owner, more):
                raise FetchSessionError(ErrorCode.INVALID_FETCH_SESSION_EPOCH)
            self._add_room(session, more)
        session.adding += added
        session.epoch = epoch + 1 if epoch < MAX_EPOCH else 1
        session.used_at = now
        for sessions in (self._sessions, self._owners[owner].sessions):
            sessions[session_id] = sessions.pop(session_id)
        return session

    def end(self, session: FetchSession) -> None:
        """End a session that no client knows yet."""
        if self._sessions.pop(session.session_id, None) is None:
            return
        owned = self._owners[session.owner]
        del owned.sessions[session.session_id]
        self._add_room(session, -session.room)
        if not owned.sessions:
            del self._owners[session.owner]

    def _add_room(self, session: FetchSession, partitions: int) -> None:
        session.room += partitions
        self._owners[session.owner].room += partitions
        self._room += partitions

    def _has_room(self, owner: Hashable, partitions: int) -> bool:
        """Return whether there may be so many more partitions, perhaps after evictions."""
        while self._room + partitions > MAX_ALL_PARTITIONS:
            if not self._evict_excess(owner, partitions, lambda each: each.room):
                return False
        return True

    def _evict_idle(self, now: float) -> bool:
        oldest = next(iter(self._sessions.values()))
        if now - oldest.used_at < EVICT_AFTER_SECONDS:
            return False
        self._evict(oldest)
        return True

    def _evict_excess(self, owner: Hashable, added: int, size: Callable[[_Owner], int]) -> bool:
        """Evict a session of the principal with the most, if that is far more than `owner` has."""
        largest = max(self._owners.values(), key=size, default=_Owner())
        if size(largest) <= FAR_MORE * (size(self._owners.get(owner, _Owner())) + added):
            return False
        self._evict(next(iter(largest.sessions.values())))
        return True

    def _evict(self, session: FetchSession) -> None:
        self.end(session)
        self.evictions += 1

    def _take_id(self) -> int:
        while True:
            session_id = self._random.randint(1, MAX_EPOCH)
            if session_id not in self._sessions:
                return session_id


def is_full(epoch: int) -> bool:
    """Return whether a request with this epoch is a full fetch."""
    return epoch in (INITIAL_EPOCH, FINAL_EPOCH)
