"""Publishes the log of operations to sinks, in order, and exports it."""
