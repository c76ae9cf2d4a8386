"""Erasures: remove every value of a key from all files, by a deadline, and write a receipt."""
