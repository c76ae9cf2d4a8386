"""Cleans that several workers share: the parts of a job, each run by one worker."""
