"""Objects: compare-and-swap records and the log of their changes."""
