"""Processes that want the same few things at once, for the storms in the tests."""
