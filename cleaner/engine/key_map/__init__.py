"""The key map of a clean: the last record of each key, in memory, by offset or by rank."""
