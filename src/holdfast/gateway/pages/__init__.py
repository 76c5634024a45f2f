"""The dashboard: the state of the database, problems first, rendered on the server and updated by server-sent events.

snapshot    reads the database, at most once a second however many clients watch
problems    PURE: what is wrong in a snapshot
panels      PURE: the values that each panel of the page shows
formatting  PURE: spans, numbers, and fields of records
stream      the current state of the page, and its updates for clients
routes      the page, its stream and its static files; nothing is loaded from elsewhere
"""

from __future__ import annotations

from holdfast.gateway.pages.routes import loops, router

__all__ = ["loops", "router"]
