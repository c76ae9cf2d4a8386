"""The cleaner on the broker's event loop: who is cleaned when, by whom, and what is told of it."""
