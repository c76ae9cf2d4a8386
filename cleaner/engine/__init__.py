"""One clean of one partition, run in a worker: two passes or one, and the compiled loops."""
