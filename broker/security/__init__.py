"""TLS of the listeners: certificates, contexts and the principal of a client certificate."""
