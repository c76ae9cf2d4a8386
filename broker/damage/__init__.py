"""Damaged offsets: report them, repair their logs."""
