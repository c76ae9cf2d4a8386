"""The `varve` commands for a running broker: over HTTP; in kafka/, over Kafka's protocol."""
