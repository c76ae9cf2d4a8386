"""Secrets, certificates and the security settings of listeners and clients."""
