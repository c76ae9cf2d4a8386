"""Shows people the content of topics: pages of records, records without a key, old segments."""
