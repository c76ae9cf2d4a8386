"""Engines that run stages: local processes, or Spark's executors."""
