"""Committed offsets of groups: their records in __consumer_offsets, lookup, expiry."""
