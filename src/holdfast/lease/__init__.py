"""The lease: durable, exclusive, expiring, fenced. Rules, both flavours, the keeper and the SQL of both engines."""
