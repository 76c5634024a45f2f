"""Mistakes that a type checker has to find: each is in the line that says so."""

from __future__ import annotations

import holdfast


def forget_lock(grant: holdfast.LockGrant) -> None:
    """For locks."""


def mistakes(client: holdfast.Client, term: holdfast.Term) -> None:
    client.lease("x", ttl="30")  # mistake: seconds are a number
    client.lease("x", on_lost="abort")  # mistake: not one of flag, cancel, exit
    client.lease("x", tttl=30)  # mistake: no such argument
    client.lease("x", on_lost=forget_lock)  # mistake: it gets a LeaseGrant
    client.lock(("agent", "7"))  # mistake: the number of a lock is an int
    holdfast.LeaseExpired  # mistake: no such name
    client.lease("x").acquire().fence + "1"  # mistake: a fence is a number
    client.lease("x").try_acquire().release()  # mistake: None when it is taken
    client.operation("k").run(lambda: 1).result.upper()  # mistake: the result is an int
    client.operation("k", retry=3)  # mistake: a Retry
    client.objects.put_if("t", "1", {}, 7)  # mistake: a condition


async def asynchronous_mistakes(client: holdfast.AsyncClient) -> int:
    grant: holdfast.LeaseGrant = await client.lease("x").acquire()  # mistake: an AsyncLeaseGrant
    return client.lease("x").acquire().fence  # mistake: not awaited
