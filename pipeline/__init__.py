"""Jobs over whole topics that run outside the broker: on Spark or in local processes.

This is the top layer. `varve pipeline` starts it in a process of its own. It talks to a broker only
through the HTTP API and the Kafka protocol (`admin.client`, `protocol`).
"""
