"""The broker's side of the cleaner: facts, publication, checks of logs, Spark jobs."""
