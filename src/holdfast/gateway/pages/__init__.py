"""The dashboard: what is so on this database, problems first, rendered here and kept current by server-sent events.

looking   asks the database, all at once and never more often than once a second, however many watch
problems  what is wrong, judged from what was seen
parts     what each part of the page tells
telling   one picture a replica, and who is told when a part of it has changed
serving   the page, its stream, and the few files that it needs: everything comes from here
"""

from __future__ import annotations

from holdfast.gateway.pages.serving import loops, router

__all__ = ["loops", "router"]
