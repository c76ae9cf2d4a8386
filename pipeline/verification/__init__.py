"""The parts of `varve pipeline verify`."""
