"""The dashboard of any holdfast database: ``app.mount("/holdfast", holdfast.dashboard(client))``.

Pages are rendered on the server, are readable without scripts, and follow the database by server-sent events. Nothing
is loaded from elsewhere, and nothing is written without ``operator=``.

app          the ASGI application: routes, security headers, streams, dialogs
stream       the current state of one page, and its updates for clients
source       calls a client, sync or async
snapshot     reads what the overview shows
problems     PURE: what is wrong in a snapshot
panels       PURE: the values that each panel of the overview shows
timeline     PURE: who held which leases when
things       the pages of one lease, lock, operation, schedule or slot pool
explanation  PURE: what a name is, and why it is in its state
listings     the pages that list all rows of a kind
charts       PURE: bars and scale of a chart; the samples of who waited
activity     the page of charts
tables       PURE: the cells, filter, order and pages of a table
actions      the governed commands that have a dialog
formats   PURE: spans, numbers, and fields of records

Invariant: a panel contains points in time and no ages, so it stays equal as long as nothing happens.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    """``holdfast.dashboard`` is this package and the public function; a call works, whichever is imported first."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        from holdfast.dashboard.app import dashboard

        return dashboard(*arguments, **options)


sys.modules[__name__].__class__ = _CallableModule
