"""Keeps the event loop free: turns of long work, slots shared fairly, threads, pauses of Python."""
