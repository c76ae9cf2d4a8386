"""One partition's log: `Log` appends, its parts read, roll, flush, expire, swap and truncate."""
