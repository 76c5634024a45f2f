# Generated from _async/recipes/__init__.py by scripts/unasync.py. Do not edit.
"""Recipes over the primitives: what people build from leases, built once."""
