"""What clients see: throughput and latency of requests, starts, many connections."""
