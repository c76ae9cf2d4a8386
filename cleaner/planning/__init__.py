"""Decides which partitions to clean, and why others are not cleaned. Pure."""
