"""Classic consumer groups and their committed offsets."""
