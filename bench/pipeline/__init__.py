"""What jobs on Spark cost."""
