"""Worker processes: start, throttle and replace them, exchange messages with them."""
