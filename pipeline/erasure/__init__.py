"""The parts of `varve pipeline erase`."""
