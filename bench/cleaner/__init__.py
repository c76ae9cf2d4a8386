"""What a clean costs: our cleaner beside Apache Kafka's, and its parts."""
