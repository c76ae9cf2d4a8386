"""Work on whole topics outside of the broker: on Spark, or on this machine's processes.

The top layer. It runs in processes of its own, started by `varve pipeline`, and speaks with a
broker through its HTTP API and the Kafka protocol alone (`admin.client`, `protocol`).
"""
