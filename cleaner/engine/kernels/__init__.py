"""The cleaner's compiled loops. Its modules import Numba, so only workers import them."""


def warm_up() -> None:
    """Compile every kernel for the types it is called with, or load it from the cache.

    Runs all in-memory steps of a clean on one small batch.
    """
    from cleaner.engine.kernels.first_calls import run_all

    run_all()
