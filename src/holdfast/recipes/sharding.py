"""Which replica has which shard: fair shares, and as little moving as that takes. Every replica plans for itself, from
what the database lists; two whose lists differ for a moment only make a shard wait, never shared."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from holdfast.lease.terms import LeaseTerms
from holdfast.names import check_name

MOST = 4096


@dataclass(frozen=True, slots=True)
class ShardTerms:
    """The arguments of ``client.shards(…)``, checked."""

    name: str
    count: int
    ttl: float
    holder: str | None

    @classmethod
    def check(cls, name: str, count: object, *, ttl: float, holder: str | None) -> ShardTerms:
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST:
            raise ValueError(f"count must be a whole number from 1 to {MOST}, not {count!r}")
        lease = LeaseTerms.check(check_name(name, most=150), ttl=ttl, holder=holder)
        if holder is not None:
            check_name(holder, "holder", most=180)  # an instance's nonce is added
        return cls(name, count, lease.ttl, holder)

    def shard(self, number: int) -> str:
        """The name of its lease."""
        return f"{self.name}/shard/{number}"

    def member(self, nonce: str) -> str:
        """The name of the lease that says: this replica is there."""
        return f"{self.name}/member/{nonce}"

    def listed(self, leases: Collection[tuple[str, str]]) -> tuple[set[str], dict[int, str]]:
        """From names and holders: who is there, and who has which shard."""
        members, owners, shard = set(), {}, self.shard(0)[:-1]
        for lease, holder in leases:
            number = lease.removeprefix(shard)
            if lease.startswith(self.member("")):
                members.add(holder)
            elif number != lease and number.isascii() and number.isdigit():
                owners[int(number)] = holder
        return members, owners


class Plan(NamedTuple):
    release: list[int]
    take: list[int]
    wanting: bool
    """We have less than our share, and there is nothing to take: somebody will release some."""


def plan(me: str, count: int, members: Collection[str], owners: Mapping[int, str]) -> Plan:
    """What we should do now. Shares differ by one at the most; the larger ones go to those who have more already."""
    everyone = sorted({*members, me})
    held = {each: [shard for shard, owner in owners.items() if owner == each and shard < count] for each in everyone}
    small, larger = divmod(count, len(everyone))
    ranked = sorted(everyone, key=lambda each: (-len(held[each]), each))
    share = small + (ranked.index(me) < larger)
    mine = sorted(held[me])
    free = [shard for shard in range(count) if shard not in owners]
    start = ranked.index(me) * len(free) // len(everyone)  # so that not all reach for the same one
    room = max(0, share - len(mine))
    return Plan(mine[share:], (free[start:] + free[:start])[:room], room > len(free))


def shard_of(key: str, count: int) -> int:
    """The same in every process, and for ever."""
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest()) % count
