"""Requests about compaction: the cleaner, its queue and checks, views, erasures, leases."""
