"""One module per family of requests; each handler answers one API."""
