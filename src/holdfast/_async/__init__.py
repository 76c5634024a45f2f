"""The source of both flavours: scripts/unasync.py writes _sync/ from this."""
