"""The compacted view of a log: manifest, ledger, and the log that readers see."""
