"""Proofs of the promises of holdfast: chaos runs, seeded bugs, leader succession, storms. Not in the wheel."""
