"""Consumer groups of the classic protocol: the leader of a group assigns partitions."""
