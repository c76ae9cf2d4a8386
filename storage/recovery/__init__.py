"""Loading a log after a clean stop or a crash."""
