"""Examines a database, and says what to do about each problem. It writes nothing."""
