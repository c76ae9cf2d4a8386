"""Cleaning and indexing partitions on an engine."""
