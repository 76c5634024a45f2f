"""What ties holdfast to other libraries. Each module stands on the public door, and imports its library not at all or
only when it is used."""


def missing(error: ModuleNotFoundError, extra: str) -> ModuleNotFoundError:
    """In words that say what to do."""
    return ModuleNotFoundError(f"{error.name} is not installed: pip install 'holdfast[{extra}]'", name=error.name)
