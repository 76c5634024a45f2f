"""An integration whose library is not installed says what to install."""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "library", "extra"),
    [
        ("lineage.graph", "neo4j", "graph"), ("lineage.openlineage", "openlineage.client.event_v2", "openlineage"),
        ("integrations.flask", "flask", "flask"), ("integrations.opentelemetry", "opentelemetry", "otel"),
        ("integrations.prometheus", "prometheus_client", "prometheus"),
    ],
)  # fmt: skip
def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, module: str, library: str, extra: str) -> None:
    monkeypatch.delitem(sys.modules, f"holdfast.{module}", raising=False)
    monkeypatch.setitem(sys.modules, library, None)
    told = rf"^{library} is not installed: pip install 'holdfast\[{extra}\]'$"
    with pytest.raises(ModuleNotFoundError, match=told) as raised:
        importlib.import_module(f"holdfast.{module}")
    assert raised.value.name == library
