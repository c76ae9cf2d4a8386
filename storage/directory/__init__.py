"""A log directory: its identity, its metadata, its partition folders."""
