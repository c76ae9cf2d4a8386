"""A search for the records of one key in all files of a partition."""
