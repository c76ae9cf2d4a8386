"""The HTTP API below /api/v1, which the command line and the console use.

`kafka/` has the requests that the handlers of the Kafka protocol answer, `compaction/` those about
the cleaner, views, erasures and leases. `openapi/` lists all of them.
"""
