"""The policy of a client: declared in Python, or read from holdfast.toml.

client = holdfast.Client(url, policy=holdfast.Policy({"burials*": {"sovereign": True, "sensitive": True}}))
client = holdfast.Client(url, policy=holdfast.Policy.read("holdfast.toml"))
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

from holdfast.governance.policy import Rule, Rules


class Policy(Rules):
    """What may be done to which datasets: ``Policy(datasets, *rules)``, or ``Policy.read(file, *rules)``.

    ``datasets``: by pattern (``*`` and ``?``), a ``Dataset`` or a dict of its fields. ``rules``: functions of a
    ``PolicyContext`` that answer ``Allow()``, ``Deny(reason)`` or ``Review(reason)``; the strictest answer counts."""

    @classmethod
    def read(cls, path: str | os.PathLike[str], *rules: Rule) -> Self:
        """The tables ``[datasets."pattern"]`` of a TOML file, with ``rules`` of one's own beside them. ValueError with
        all that is wrong with them; a file without such a table declares nothing, and that is an error, too."""
        import tomllib

        name = os.fspath(path)
        try:
            table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{name} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise ValueError(f"{name} is not valid TOML: {error}") from None
        if "datasets" not in table:
            raise ValueError(f'{name} declares no dataset: it needs tables such as [datasets."burials*"]')
        try:
            return cls(table["datasets"], *rules)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
