"""Workers outside the pool that share its budgets: for views, leased work, checks and erasures."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Final

from cleaner.scheduler.cleaner_pool import CleanerPool
from cleaner.workers.budget_share import BudgetShare, open_budget_share
from cleaner.workers.dedicated_worker import DedicatedWorker, JobRunner, open_dedicated_worker
from cleaner.workers.process import Spawn
from config.settings import CleanerSettings

StartWorker = Callable[[], AbstractAsyncContextManager[JobRunner]]
OpenShare = Callable[[], AbstractAsyncContextManager[BudgetShare]]

# Indexes among the workers that share the cleaner's budgets.
VIEW_WORKER: Final = -1
LEASE_WORKER: Final = -2
CHECK_WORKER: Final = -3
SEARCH_WORKER: Final = -4


class DedicatedWorkers:
    """Starts a worker for one compaction or verification; it ends with it."""

    def __init__(
        self, spawn: Spawn, pool: CleanerPool, settings: Callable[[], CleanerSettings]
    ) -> None:
        self._spawn = spawn
        self._dispatcher = pool.dispatcher
        self._settings = settings

    def for_views(self) -> AbstractAsyncContextManager[JobRunner]:
        """Return a worker that compacts views."""
        return self._worker(VIEW_WORKER)

    def for_leases(self) -> AbstractAsyncContextManager[JobRunner]:
        """Return a worker that verifies leased work."""
        return self._worker(LEASE_WORKER)

    def for_checks(self) -> AbstractAsyncContextManager[DedicatedWorker]:
        """Return a worker that checks a log."""
        return self._worker(CHECK_WORKER)

    def for_searches(self) -> AbstractAsyncContextManager[DedicatedWorker]:
        """Return a worker that searches files for a key."""
        return self._worker(SEARCH_WORKER)

    def view_share(self) -> AbstractAsyncContextManager[BudgetShare]:
        """Return the view worker's budget, for copies that are made before it starts."""
        return open_budget_share(
            index=VIEW_WORKER, budgets=self._dispatcher.throttle, top_up=self._dispatcher.top_up
        )

    def _worker(self, index: int) -> AbstractAsyncContextManager[DedicatedWorker]:
        return open_dedicated_worker(
            self._spawn,
            self._settings().nice,
            index=index,
            budgets=self._dispatcher.throttle,
            top_up=self._dispatcher.top_up,
        )
