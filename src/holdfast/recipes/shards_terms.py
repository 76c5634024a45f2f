"""The rules of shards: which replica should hold which, so that shares are even and few shards move.

Every replica plans for itself, from the leases that the database lists. Two replicas whose lists differ for a moment
may leave a shard free for a while, but never share one: its lease decides.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from holdfast.lease.terms import LeaseTerms
from holdfast.names import check_name
from holdfast.recipes.elector_terms import HOLDER_LENGTH

MAX_SHARDS = 4096


@dataclass(frozen=True, slots=True)
class ShardTerms:
    """The arguments of ``client.shards(…)``, checked."""

    name: str
    count: int
    ttl: float
    holder: str | None

    @classmethod
    def check(cls, name: str, count: object, *, ttl: float, holder: str | None) -> ShardTerms:
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_SHARDS:
            raise ValueError(f"count must be a whole number from 1 to {MAX_SHARDS}, not {count!r}")
        lease = LeaseTerms.check(check_name(name, limit=150), ttl=ttl, holder=holder)
        if holder is not None:
            check_name(holder, "holder", limit=HOLDER_LENGTH)
        return cls(name, count, lease.ttl, holder)

    def shard_lease(self, number: int) -> str:
        """The name of a shard's lease."""
        return f"{self.name}/shard/{number}"

    def member_lease(self, nonce: str) -> str:
        """The name of the lease by which a replica is a member."""
        return f"{self.name}/member/{nonce}"

    def parse_leases(self, leases: Collection[tuple[str, str]]) -> tuple[set[str], dict[int, str]]:
        """From names and holders of leases: the members, and the owner of each shard that is held."""
        members, owners, prefix = set(), {}, self.shard_lease(0)[:-1]
        for name, holder in leases:
            number = name.removeprefix(prefix)
            if name.startswith(self.member_lease("")):
                members.add(holder)
            elif number != name and number.isascii() and number.isdigit():
                owners[int(number)] = holder
        return members, owners


class ShardPlan(NamedTuple):
    release: list[int]
    take: list[int]
    is_short: bool
    """Our share is larger than what we hold and what is free: other replicas will release some soon."""


def plan(holder: str, count: int, members: Collection[str], owners: Mapping[int, str]) -> ShardPlan:
    """What ``holder`` should do now. Shares differ by at most one. The larger shares go to the
    replicas that hold most shards now, so that few shards move."""
    replicas = sorted({*members, holder})
    held = {each: [shard for shard, owner in owners.items() if owner == each and shard < count] for each in replicas}
    small, larger = divmod(count, len(replicas))
    ranked = sorted(replicas, key=lambda replica: (-len(held[replica]), replica))
    rank = ranked.index(holder)
    share = small + (rank < larger)
    ours = sorted(held[holder])
    free = [shard for shard in range(count) if shard not in owners]
    start = rank * len(free) // len(replicas)  # so that not all replicas ask for the same one
    room = max(0, share - len(ours))
    return ShardPlan(ours[share:], (free[start:] + free[:start])[:room], room > len(free))


def shard_of(key: str, count: int) -> int:
    """The number of a key's shard: the same in every process and in every version of holdfast."""
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest()) % count
