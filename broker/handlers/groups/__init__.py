"""Handlers of the APIs of groups of both protocols and of their committed offsets."""
