"""Transactions: their state, the log that keeps it, and the coordinator that ends them."""
