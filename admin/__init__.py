"""The `varve` commands for a running broker, by protocol, and what they share."""
