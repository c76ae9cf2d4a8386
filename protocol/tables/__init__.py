"""The message tables of the Kafka protocol, by area."""
