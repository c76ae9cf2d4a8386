"""What is to be cleaned, and why not the rest. Pure: facts in, verdicts and jobs out."""
