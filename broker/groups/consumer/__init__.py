"""Consumer groups of the consumer rebalance protocol (KIP-848): the broker assigns partitions."""
