"""Lease, and what follows it: each primitive is one module over an engine."""
