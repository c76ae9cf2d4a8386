"""Runs outside of the broker: leased, staged, and adopted or swept. docs/decisions/0017."""
