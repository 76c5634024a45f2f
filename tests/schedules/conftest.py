from __future__ import annotations

from tests.recipes.conftest import connect

__all__ = ["connect"]
