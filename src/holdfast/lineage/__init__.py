"""Publishes the events of the log to sinks, in order, and exports them to catalogues."""
