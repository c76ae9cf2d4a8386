"""The jobs of `varve pipeline`, one module each. Importing this package imports none of them."""
