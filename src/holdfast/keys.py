"""The key of an operation: two requests with the same key are the same operation. Also its digest and its lock.

    key = OperationKey(pipeline="etl", task="load", dataset="parcels", operation="upsert", version="3",
                       checksum=checksum_file(path), params={"srid": 4326}, bucket=time_bucket(now, 3600))

The digest is taken of an encoding in which every part has its length, so two different keys never have the same bytes,
as they could if their parts were just concatenated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from functools import cached_property
from hashlib import sha256
from operator import attrgetter
from typing import Any, ClassVar

from holdfast import canonical
from holdfast.names import check_name

MOST_SHARDS = 1024
_HEX = frozenset("0123456789abcdef")
_EMPTY: Mapping[str, Any] = {}
_NO_PARAMS = canonical.digest({})
_LOCK_PREFIX = 7847
"""The first 16 bits of the locks of operations, as ``lock_label`` in the database knows them."""
_PLAIN, _PLAIN_LOCK = canonical.encode("holdfast plain operation"), canonical.encode("holdfast plain lock")
_NEEDED = ("pipeline", "task", "dataset", "operation")
_NAMES = (*_NEEDED, "version", "checksum", "bucket")
_parts = attrgetter(*_NAMES)
_MONDAY = datetime(1, 1, 1)  # noqa: DTZ001
"""A Monday, at midnight. Spans are counted from it, so weeks begin on Monday and days at midnight."""


def _check_sha256(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a str, not {type(value).__name__}")
    if len(value) != 64 or not set(value) <= _HEX:
        raise ValueError(f"{what} must be a sha256 of 64 digits 0-9 and a-f, not {value!r:.80}")
    return str(value)


class _HashedParams(Mapping[str, Any]):
    """Parameters of which only the hash is known. In the field ``params``, so that ``dataclasses.replace`` keeps the
    hash as long as it keeps the parameters, and drops it with them."""

    def __init__(self, params_hash: str) -> None:
        self.params_hash = _check_sha256(params_hash, "params_hash")

    def __getitem__(self, name: str) -> Any:
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return f"<sha256 {self.params_hash}>"


@dataclass(frozen=True, eq=False, kw_only=True, init=False)
class OperationKey:
    """One logical operation: equal keys are the same operation, which takes effect once.

    ``version`` of the code, ``checksum`` of its input, ``params`` it runs with, ``bucket``: the span of time that it is
    for. Another value of any of these makes another operation. ``params_hash`` in place of ``params``: their sha256, as
    hex, from a caller that has no more than that. ``digest`` in place of the sha256 of all these parts: from a system
    that has its own; ``dataclasses.replace`` drops it. An operation belongs to the pipeline, task, dataset, operation,
    checksum and parameters of its first attempt: others with its digest are KeyReused. ``shards``: over how many locks
    the keys of one dataset and operation are spread; it is not a part of the identity, and may be changed later.
    """

    pipeline: str
    task: str
    dataset: str
    operation: str
    version: str | None = None
    checksum: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    bucket: str | None = None
    shards: int = 1
    params_hash: str = field(init=False, repr=False)
    digest: str = field(init=False, repr=False)
    """sha256, as hex: identifies the operation in the log."""
    _parts_digest: str | None = field(init=False, repr=False, default=None)
    """sha256 of the parts when ``digest`` was given, else None."""

    def __init__(
        self, *, pipeline: str, task: str, dataset: str, operation: str, version: str | None = None,
        checksum: str | None = None, params: Mapping[str, Any] = _EMPTY, bucket: str | None = None, shards: int = 1,
        params_hash: str | None = None, digest: str | None = None,
    ) -> None:  # fmt: skip
        if params_hash is not None:
            if params is not _EMPTY:
                raise ValueError("params and params_hash exclude each other: pass one of them")
            params = _HashedParams(params_hash)
        elif params is _EMPTY:
            params = {}
        self.__dict__.update(
            pipeline=pipeline, task=task, dataset=dataset, operation=operation, version=version, checksum=checksum,
            params=params, bucket=bucket, shards=shards,
        )  # fmt: skip
        self.__post_init__()
        if digest is not None:
            given = _check_sha256(digest, "digest")
            if given != self.digest:
                self.__dict__.update(digest=given, _parts_digest=self.digest)

    def __post_init__(self) -> None:
        for name, part in zip(_NAMES, _parts(self), strict=True):
            if (part is not None or name in _NEEDED) and (text := check_name(part, name)) is not part:
                object.__setattr__(self, name, text)  # a StrEnum, say: database drivers differ in how they store one
        _check_shards(self.shards)
        if not isinstance(self.params, Mapping):
            raise TypeError(f"params must be a dict, not {type(self.params).__name__}")
        if isinstance(self.params, _HashedParams):
            params_hash = self.params.params_hash
        else:
            params_hash = canonical.digest(self.params, "params") if self.params else _NO_PARAMS
        object.__setattr__(self, "params_hash", params_hash)
        object.__setattr__(self, "digest", digest_of(*_parts(self), params_hash))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OperationKey) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def label(self) -> str:
        """A text for people: ``etl/load parcels upsert v3 2026-11-15``. Not unique: keys that differ only in checksum
        or params have the same."""
        return label_of(self.pipeline, self.task, self.dataset, self.operation, self.version, self.bucket)

    @property
    def shard(self) -> int | None:
        """The number of this key's lock, from 0, among the ``shards`` locks of its dataset and operation; None when
        there is only one."""
        return int(self.digest[:16], 16) % self.shards if self.shards > 1 else None

    @cached_property
    def lock_key(self) -> int:
        """The key of its advisory lock, from a hash of dataset, operation and shard."""
        return lock_key(self.dataset, self.operation, self.shard)

    def _check_whole(self, why: str = "sovereign") -> None:
        """ValueError when the dataset must have one lock, which ``why`` explains, and its keys have several."""
        if self.shards > 1:
            raise ValueError(
                f"dataset {self.dataset!r} is {why} and is locked as a whole: shards must be 1, not {self.shards}"
            )


@dataclass(frozen=True)
class PlainKey:
    """A key that is a text: equal texts are the same operation, and each has a lock of its own. A text of 64
    hexadecimal digits is a digest, so a digest that was copied from a listing can be used as the key."""

    text: str
    pipeline: ClassVar[None] = None
    task: ClassVar[None] = None
    dataset: ClassVar[None] = None
    operation: ClassVar[None] = None
    version: ClassVar[None] = None
    checksum: ClassVar[None] = None
    bucket: ClassVar[None] = None
    params_hash: ClassVar[None] = None
    _parts_digest: ClassVar[None] = None
    shard: ClassVar[None] = None

    digest: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        text = check_name(self.text, "key")
        object.__setattr__(self, "text", text)
        object.__setattr__(self, "digest", digest_of_text(text))

    @property
    def label(self) -> str:
        return self.text

    @cached_property
    def lock_key(self) -> int:
        return _lock_key(_hash_plain(_PLAIN_LOCK, self.text))

    def _check_whole(self, why: str = "sovereign") -> None:
        """Nothing to check: a plain key has one lock."""


Key = OperationKey | PlainKey


def as_key(value: object) -> Key:
    """The key that a caller gave, a text or an OperationKey."""
    if isinstance(value, str):
        return PlainKey(value)
    if isinstance(value, OperationKey | PlainKey):
        return value
    raise TypeError(f"key must be a str or an OperationKey, not {type(value).__name__}")


def digest_of(*parts: str | None) -> str:
    """The digest of an OperationKey with these parts: pipeline, task, dataset, operation, version, checksum, bucket and
    params_hash."""
    return canonical.digest(["holdfast operation", *parts])


def digest_of_text(text: str) -> str:
    """The digest of a PlainKey with this text."""
    is_digest = len(text) == 64 and set(text) <= _HEX
    return text if is_digest else str(_hash_plain(_PLAIN, text).hexdigest())


def label_of(
    pipeline: str | None, task: str | None, dataset: str | None, operation: str | None, version: str | None,
    bucket: str | None,
) -> str:  # fmt: skip
    """The label of an OperationKey with these parts. A version that begins with a digit is marked with a ``v``."""
    label = f"{pipeline}/{task} {dataset} {operation}"
    if version is not None:
        label += f" v{version}" if version[0].isdecimal() else f" {version}"
    return label if bucket is None else f"{label} {bucket}"


def lock_key(dataset: str, operation: str, shard: int | None = None) -> int:
    """The key of an advisory lock: 48 bits of a hash behind a prefix, by which listings recognise it. If two collide,
    one operation waits for the other; they never share the lock."""
    return _lock_key(sha256(canonical.encode(("holdfast lock", dataset, operation, shard))))


def time_bucket(when: datetime, every: timedelta | float, *, zone: tzinfo | None = None) -> str:
    """The span of time that ``when`` is in, as text for a key: the same for every instant of the span.

    ``every``: its length, in seconds or as a timedelta. Spans are counted in UTC, whatever the zone of ``when``: hours
    and days begin as in UTC, weeks on Monday. ``zone``: local days or weeks of that zone; a day has 23 or 25 hours when
    its clocks change. Shorter spans take no zone: the hour that is repeated would be one bucket instead of two.
    """
    length = _length(every)
    if not isinstance(when, datetime):
        raise TypeError(f"when must be a datetime, not {type(when).__name__}")
    if when.utcoffset() is None:
        raise ValueError(f"when must have a time zone, such as datetime.now(UTC): {when!r} is another time elsewhere")
    if zone is not None and length % timedelta(days=1):
        raise ValueError(f"every must be whole days with a zone, not {every!r}: omit zone to count spans in UTC")
    name = "Z" if zone is None else f"[{_zone_name(zone)}]"
    try:
        there = when.astimezone(UTC if zone is None else zone).replace(tzinfo=None)
    except OverflowError:
        raise ValueError(f"when is {when!r}: in {zone or 'UTC'} its year is not between 1 and 9999") from None
    begin = _MONDAY + (there - _MONDAY) // length * length
    seconds, rest = divmod(length // timedelta(microseconds=1), 1_000_000)
    size = f"{seconds}.{rest:06}s" if rest else f"{seconds}s"
    return f"{(begin if zone is None else begin.date()).isoformat()}{name}/{size}"


def _zone_name(zone: tzinfo) -> str:
    name = str(zone) if isinstance(zone, timezone) else getattr(zone, "key", None)
    if not isinstance(name, str):
        raise TypeError(f"zone must have a name, as ZoneInfo('Europe/Vienna') has, not {zone!r:.80}")
    return name


def _length(every: object) -> timedelta:
    if isinstance(every, bool) or not isinstance(every, timedelta | int | float):
        raise TypeError(f"every must be seconds or a timedelta, not {type(every).__name__}")
    try:
        length = every if isinstance(every, timedelta) else timedelta(seconds=every)
    except (OverflowError, ValueError) as error:
        raise ValueError(f"every must be a length of time, not {every!r}: {error}") from None
    if length <= timedelta(0):
        raise ValueError(f"every must be more than 0, not {every!r}")
    return length


def _check_shards(shards: object) -> None:
    if isinstance(shards, bool) or not isinstance(shards, int):
        raise TypeError(f"shards must be an int, not {type(shards).__name__}")
    if not 1 <= shards <= MOST_SHARDS:
        raise ValueError(f"shards must be a whole number from 1 to {MOST_SHARDS}, not {shards}")


def _hash_plain(purpose: bytes, text: str) -> Any:
    """sha256 of the canonical encoding of the list [``purpose``, ``text``]. hot: written out by hand, because every
    operation with a plain key computes it (bench operation). ``text`` has passed ``check_name``."""
    body = text.encode()
    body = b"%bs%d:%b" % (purpose, len(body), body)
    return sha256(b"l%d:%b" % (len(body), body))


def _lock_key(content: Any) -> int:
    return _LOCK_PREFIX << 48 | int.from_bytes(content.digest()[:6], "big")
