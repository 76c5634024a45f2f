"""What proves the promises of holdfast: chaos, seeded bugs, succession, storms. Not in the wheel."""
