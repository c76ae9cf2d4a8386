"""Compaction: pure planning and states, worker processes, budgets, the pool on the loop."""
