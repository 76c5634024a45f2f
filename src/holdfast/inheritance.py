"""The lease that `holdfast run` holds for this process, as a grant of its own.

With an ``AsyncClient`` the answer is to be awaited: ``grant = await holdfast.inherited(client)``.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable
from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:
    from holdfast.client import Client
    from holdfast.client_async import AsyncClient
    from holdfast.lease.grant import LeaseGrant
    from holdfast.lease.grant_async import AsyncLeaseGrant


@overload
def inherited(client: Client) -> LeaseGrant: ...
@overload
def inherited(client: AsyncClient) -> Awaitable[AsyncLeaseGrant]: ...
def inherited(client: Client | AsyncClient) -> LeaseGrant | Awaitable[AsyncLeaseGrant]:
    """A grant for the lease in HOLDFAST_LEASE and HOLDFAST_TOKEN. LookupError outside of `holdfast run`, LeaseLost when
    the lease has passed on already.

    `holdfast run` goes on renewing the lease, and ends this process when it is lost. ``grant.protect`` and
    ``grant.transaction`` ask the database and are good for as long; ``grant.check()`` knows only what was left when it
    was inherited, or at the last ``grant.renew()``: after a TTL without one ``grant.lost`` is True, though the lease is
    kept. Releasing it is up to `holdfast run`: do not use it in a ``with``.
    """
    name, token = os.environ.get("HOLDFAST_LEASE"), os.environ.get("HOLDFAST_TOKEN")
    if not name or not token:
        raise LookupError(
            "HOLDFAST_LEASE and HOLDFAST_TOKEN are not set: start this program with `holdfast run NAME -- …`"
        )
    return client.lease(name).adopt(token)
