"""Commands that speak the Kafka protocol: topics, records, groups, users and ACLs."""
