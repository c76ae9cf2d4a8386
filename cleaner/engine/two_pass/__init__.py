"""The clean in two passes: index the keys, then rewrite the groups."""
