"""Cleans whose keys do not fit into the key map: the keys are spilled to a scratch file by hash."""
