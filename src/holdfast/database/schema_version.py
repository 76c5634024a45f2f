"""Which tables a client works with: those that this holdfast makes, and for a while those of the next."""

from __future__ import annotations

from holdfast.database.privileges import migrate_command
from holdfast.database.statements import FOUNDATION, migrations
from holdfast.database.url import Database
from holdfast.errors import SchemaMismatch


class Tables:
    def __init__(self, database: Database) -> None:
        self.database = database
        self.lenient = False
        """Whether tables that are not the newest will do, as far as they can govern what makes them so."""
        self.met = False
        """They are there, and are ours, as far as we have seen."""

    @property
    def newest(self) -> int:
        return migrations(self.database.dialect, self.database.schema)[-1].version

    def check_version(self, found: int | None) -> None:
        if found != self.newest and not self.suffices(found):
            raise self.mismatch(found)

    def suffices(self, found: int | None) -> bool:
        """Tables that are made newer under a client will do for what it has begun, and for the rest of its life: in a
        deploy both versions run, and the earlier one has leases to give back and operations to end."""
        if (found or 0) > self.newest:
            return self.met
        return self.lenient and (found or 0) >= FOUNDATION

    def mismatch(self, found: int | None) -> SchemaMismatch:
        wanted = self.newest
        state = f"is at version {found}" if found else "is not there"
        command = migrate_command(self.database.schema)
        remedy = f"run '{command}' or client.migrate()" if (found or 0) < wanted else "upgrade holdfast"
        return SchemaMismatch(
            f"schema {self.database.schema!r} in {self.database} {state}, this holdfast needs version {wanted}: "
            f"{remedy}"
        )
