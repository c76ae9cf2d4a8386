"""Keeps the event loop free: turns of long work, fair slots, threads, garbage collection."""
