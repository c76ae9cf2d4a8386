"""The broker's side of the cleaner: its host, and the offload to Spark."""
