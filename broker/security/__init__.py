"""Security of clients: TLS, SASL, users and tokens, access control lists, the audit log."""
