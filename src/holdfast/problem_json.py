"""``application/problem+json`` (RFC 9457): the error answers of the gateway, the driver and the ASGI middleware.

Pure: a server catches a Problem and sends its document itself. No framework is imported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

MEDIA_TYPE = "application/problem+json"


class Problem(Exception):
    """An error answer. ``title`` is by default the phrase of the status; ``more`` are further members."""

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        type: str = "about:blank",
        title: str | None = None,
        headers: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(detail)
        self.status, self.detail, self.headers, self.more = status, detail, dict(headers or {}), more
        self.type, self.title = type, title or HTTPStatus(status).phrase

    def document(self, request_id: str | None = None) -> dict[str, Any]:
        """The members; ``requestId`` is the id under which the log has the request."""
        members = {"type": self.type, "title": self.title, "status": self.status, "detail": self.detail, **self.more}
        return members if request_id is None else members | {"requestId": request_id}

    def body(self, request_id: str | None = None) -> bytes:
        """In ASCII: a detail may repeat a lone surrogate that a client has sent, which UTF-8 cannot encode."""
        return json.dumps(self.document(request_id), default=str).encode()
