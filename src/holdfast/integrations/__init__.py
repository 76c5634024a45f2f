"""Adapters for other libraries. Each module uses the public names alone, and imports its library when it is used."""
