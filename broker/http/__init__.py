"""The HTTP server: metrics, health, and the API below /api."""
