"""Keys of topics: names, defaults, types and documentation; names of topics."""
