"""Erasures: requests that no value of a key is left in any file, with a deadline and a receipt."""
