"""One partition's log: append, read, roll, flush, truncate, delete."""
