"""Commands that use the broker's HTTP API: cleaner, log, verify, erase, leases and view."""
