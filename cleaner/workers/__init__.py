"""Worker processes: started, talked to, throttled, replaced."""
