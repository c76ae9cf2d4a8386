"""Leases of partitions to remote compactions: staging, adoption, sweeping. docs/decisions/0017."""
