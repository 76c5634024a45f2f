# Generated from _async/primitives/__init__.py by scripts/unasync.py. Do not edit.
"""Lease, and what follows it: each primitive is one module over an engine."""
