"""The HTTP API below /api/v1, which the command line uses."""
