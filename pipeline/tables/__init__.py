"""Topics as tables: read the rows of a state, convert keys and values, and publish the table.

Importing this package is cheap: Spark, Arrow and the table libraries are imported where needed.
"""
