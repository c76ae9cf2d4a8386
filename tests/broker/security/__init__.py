"""Tests of broker/security."""
