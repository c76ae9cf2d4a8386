"""Cleans that rewrite only the segments with the most garbage."""
