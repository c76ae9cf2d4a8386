"""Commands over a broker's HTTP API, and the client that they share."""
