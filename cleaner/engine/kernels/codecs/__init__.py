"""Kernels over bytes: checksums, hashes, compression, memory."""
