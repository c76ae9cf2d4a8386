"""Programs of others that tests run: Apache Kafka, its tools, Connect, a schema registry, Spark."""
