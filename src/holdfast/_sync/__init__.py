# Generated from _async/__init__.py by scripts/unasync.py. Do not edit.
"""The source of both flavours: scripts/unasync.py writes _sync/ from this."""
