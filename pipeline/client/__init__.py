"""Clients of a broker: the Kafka protocol, leases, topics."""
