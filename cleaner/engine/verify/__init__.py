"""Verification of outputs, of this or another process, and of whole logs."""
