"""Topics, partitions, and the timers that maintain their logs."""
