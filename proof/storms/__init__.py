"""Programs for load tests (storms): processes that contend for a few locks, slots or operations."""
