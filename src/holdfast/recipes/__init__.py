"""Recipes: what services are built from, on top of leases, locks, objects and the audit."""
