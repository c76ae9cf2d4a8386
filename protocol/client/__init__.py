"""Blocking clients of the Kafka protocol, with TLS and SASL."""
