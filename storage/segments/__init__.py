"""One segment: its files, batches, indexes, damage, expiry."""
