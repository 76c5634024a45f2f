"""``client.audit.list``, on every engine and in both flavours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Connect = Callable[..., Any]


def test_the_latest_of_one_action_or_actor_are_listed_however_many_others_came_later(
    connect: Connect, url: str
) -> None:
    client = connect(url)
    for action, actor in (("a.one", "jane"), ("a.two", "jane"), ("a.one", "bob"), ("a.two", "bob"), ("a.two", "bob")):
        client.audit.end(client.audit.begin(action, "it", actor=actor, reason="why"), "done")

    def listed(**options: Any) -> list[tuple[str, str]]:
        return [(entry.action, entry.actor) for entry in client.audit.list(**options)]

    assert listed(action="a.one") == [("a.one", "bob"), ("a.one", "jane")]
    assert listed(actor="jane", limit=1) == [("a.two", "jane")]
    assert listed(action="a.one", actor="jane") == [("a.one", "jane")]
    assert listed(action="a.three") == []
    assert len(listed()) == 5
    for options, argument in (({"action": ""}, "action"), ({"actor": "a\nb"}, "actor"), ({"limit": 0}, "limit")):
        with pytest.raises(ValueError, match=argument):
            listed(**options)
