"""What ties holdfast to other libraries. Each module stands on the public door, and imports its library not at all or
only when it is used."""
