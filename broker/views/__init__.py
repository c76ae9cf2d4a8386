"""Compacted views: served topics, and their compaction."""
