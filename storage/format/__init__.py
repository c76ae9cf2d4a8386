"""Formats of files and batches: parsers, encoders, names; no open files."""
