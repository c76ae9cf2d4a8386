"""What people look at in topics: pages of records, records without a key, past segments."""
