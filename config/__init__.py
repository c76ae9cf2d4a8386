"""What the operator says: tables of keys, models of the YAML, and the loader. A leaf."""
