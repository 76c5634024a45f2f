"""Examines a database and names the remedy for what it finds. Writes nothing."""
