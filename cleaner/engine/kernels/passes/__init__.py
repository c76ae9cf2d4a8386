"""Kernels over batches and records: one module for each pass."""
