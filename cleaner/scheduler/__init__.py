"""The scheduler of the cleaner, on the broker's event loop: which partition is cleaned when."""
