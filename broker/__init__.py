"""The daemon: Kafka's protocol, partitions, groups, timers, HTTP, the command line."""
