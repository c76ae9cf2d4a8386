"""One segment: its files, batches, indexes, verification, replacement."""
