"""What a lease costs, as ratios to the least that any program would have to do: ``python -m bench``."""
