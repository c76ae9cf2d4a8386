"""Verification of outputs that another process has written."""
