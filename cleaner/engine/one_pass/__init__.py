"""The clean in one pass, from the newest batch to the oldest."""
