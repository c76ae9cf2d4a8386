"""The HTTP API below /api/v1: what the command line and the console stand on."""
