"""The log on disk: batches, segments, recovery, retention. Synchronous, knows no network."""
