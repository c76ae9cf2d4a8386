"""The cleaner's compiled loops. Importing one of these modules imports Numba: workers only."""


def warm_up() -> None:
    """Compile every kernel for the types it is called with, or load it from the cache.

    Walks two small batches, one of them compressed, through all that a clean does in memory.
    """
    from cleaner.engine.kernels.first_calls import run_all

    run_all()
