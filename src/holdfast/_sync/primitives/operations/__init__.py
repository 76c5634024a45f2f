# Generated from _async/primitives/operations/__init__.py by scripts/unasync.py. Do not edit.
"""Operations: at most one effect, whatever the retries."""
