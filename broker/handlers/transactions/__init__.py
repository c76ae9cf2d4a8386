"""Handlers of producers and transactions.

They translate between messages and the transaction coordinator, which makes all decisions.
"""
