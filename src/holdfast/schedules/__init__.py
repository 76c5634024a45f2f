"""Schedules: a job runs once a slot, however many replicas there are."""
