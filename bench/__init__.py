"""The cost of leases, locks and operations, as ratios to the minimum for any program: ``python -m bench``."""
