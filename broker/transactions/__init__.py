"""Transactions: the state machine, its log, and the coordinator."""
