"""Starts, reloads and stops of the broker: opening the logs, readiness, settings, systemd."""
