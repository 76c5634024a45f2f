"""The caller's own connection, whichever database driver it belongs to."""
