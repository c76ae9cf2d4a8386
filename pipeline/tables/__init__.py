"""Topics as tables: the rows of a state, what becomes of keys and values, and how it is published.

Importing this package is cheap: Spark, Arrow and the tables' own libraries are loaded where needed.
"""
