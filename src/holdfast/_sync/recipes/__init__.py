# Generated from _async/recipes/__init__.py by scripts/unasync.py. Do not edit.
"""What services are made of, over the primitives alone."""
