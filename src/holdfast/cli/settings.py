"""Where the database is: --url, else HOLDFAST_URL, else holdfast.toml in this folder, else a file here, said aloud."""

from __future__ import annotations

import os
import sys

DEFAULT_URL = "sqlite:///holdfast.db"
CONFIG = "holdfast.toml"


def database(url: str | None, schema: str | None) -> tuple[str, str]:
    """The URL and the schema. ValueError when holdfast.toml cannot be understood."""
    from_file = _read() if os.path.exists(CONFIG) else {}  # noqa: PTH110 - pathlib would double the time to start
    url = url or os.environ.get("HOLDFAST_URL") or from_file.get("url")
    schema = schema or os.environ.get("HOLDFAST_SCHEMA") or from_file.get("schema") or "holdfast"
    if not url:
        url = DEFAULT_URL
        print(f"holdfast: no --url, no HOLDFAST_URL, no {CONFIG}: using {url} in this folder", file=sys.stderr)
    return url, schema


def _read() -> dict[str, str]:
    import tomllib

    try:
        with open(CONFIG, "rb") as file:  # noqa: PTH123
            table = tomllib.load(file)
    except OSError as error:
        raise ValueError(f"{CONFIG} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{CONFIG} is not valid TOML: {error}") from None
    for key in ("url", "schema"):
        if not isinstance(table.get(key, ""), str):  # its value is not repeated: a password may be in it
            raise ValueError(f"{key} in {CONFIG} must be a string, not {type(table[key]).__name__}")
    return table
