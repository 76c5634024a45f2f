"""Recipes over the primitives: what people build from leases, built once."""
