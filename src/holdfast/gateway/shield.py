"""Stands before everything, pure ASGI: a number for each request."""

from __future__ import annotations

import re
from typing import Any
from uuid import uuid4

from holdfast.gateway import logs
from holdfast.gateway.settings import Settings


class Shield:
    def __init__(self, app: Any, *, settings: Settings) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")
        number = given if re.fullmatch(r"[A-Za-z0-9._:-]{1,64}", given) else uuid4().hex
        scope.setdefault("state", {})["request_id"] = number
        logs.request_id.set(number)
        await self._app(scope, receive, send)
