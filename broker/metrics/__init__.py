"""Metrics for Prometheus, collected from plain counters."""
