"""Requests that the handlers of the Kafka protocol answer: for one topic, one group, or records."""
