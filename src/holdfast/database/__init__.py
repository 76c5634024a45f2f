"""One database: its URL, sessions, named statements, migrations, and the caller's own connections."""
