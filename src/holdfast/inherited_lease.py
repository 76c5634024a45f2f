"""``holdfast.inherited``: a grant for the lease that `holdfast run` holds while this process runs.

The module has another name than its function, because importing ``holdfast.inherited`` as a module would replace the
function of that name in the package.
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
    """A grant for the lease in HOLDFAST_LEASE and HOLDFAST_TOKEN; with an ``AsyncClient``, await it.

    Raises LookupError outside of `holdfast run`, and LeaseLost if the lease has passed to another holder.

    `holdfast run` renews the lease and ends this process when it is lost. ``grant.protect`` and ``grant.transaction``
    ask the database, so they work for as long as the lease is held. ``grant.check()`` knows only the time that was left
    when the grant was inherited or last renewed by ``grant.renew()``: after a TTL without one, ``grant.lost`` is True
    although the lease is held. `holdfast run` releases the lease: do not use the grant in a ``with`` statement.
    """
    name, token = os.environ.get("HOLDFAST_LEASE"), os.environ.get("HOLDFAST_TOKEN")
    if not name or not token:
        raise LookupError(
            "HOLDFAST_LEASE and HOLDFAST_TOKEN are not set: start this program with `holdfast run NAME -- …`"
        )
    return client.lease(name).adopt(token)
