"""Sockets: listeners, connections, request frames, response writes."""
