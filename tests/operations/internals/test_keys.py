"""Keys of operations, without a database: the same for the same, and for nothing else."""

from __future__ import annotations

import enum
import math
import os
import pickle
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta, timezone, tzinfo
from decimal import Decimal
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import OperationKey, canonical, checksum_file, time_bucket
from holdfast.keys import PlainKey, as_key, lock_key

PARTS: dict[str, Any] = {"pipeline": "etl", "task": "load", "dataset": "parcels", "operation": "upsert"}
VIENNA = ZoneInfo("Europe/Vienna")
NAIVE = datetime(2026, 1, 1)  # noqa: DTZ001

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(), st.uuids(), st.dates(),
    st.decimals(allow_nan=False), st.datetimes(), st.datetimes(timezones=st.just(UTC)),
)  # fmt: skip


def nested(inner: Any) -> Any:
    return st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4)


values = st.recursive(scalars, nested, max_leaves=12)


def sameness(value: Any) -> Any:
    """What Python would have to compare for two values to be the same here: equality that knows types."""
    if isinstance(value, dict):
        return "dict", frozenset((sameness(key), sameness(each)) for key, each in value.items())
    if isinstance(value, list):
        return "list", tuple(map(sameness, value))
    return type(value), value


@settings(max_examples=40)
@given(values, values)
def test_two_values_have_one_form_exactly_if_they_are_the_same(one: Any, other: Any) -> None:
    assert (canonical.encode(one) == canonical.encode(other)) == (sameness(one) == sameness(other))


def test_a_part_that_is_a_text_of_another_class_is_that_text() -> None:
    """What writes it down would ask it how it is to be written, and get another name."""

    class Dataset(str, enum.Enum):  # noqa: UP042
        PARCELS = "parcels"

    key = OperationKey(**{**PARTS, "dataset": Dataset.PARCELS})
    assert (type(key.dataset), key.label, key) == (str, OperationKey(**PARTS).label, OperationKey(**PARTS))
    assert type(as_key(Dataset.PARCELS).label) is str


@pytest.mark.parametrize(
    ("more", "label"),
    [
        ({}, "etl/load parcels upsert"),
        ({"version": "3", "bucket": "2026-11-15"}, "etl/load parcels upsert v3 2026-11-15"),
        ({"version": "v3"}, "etl/load parcels upsert v3"),
        ({"version": "main"}, "etl/load parcels upsert main"),
        ({"bucket": time_bucket(datetime(2026, 11, 15, 7, tzinfo=UTC), 86400)},
         "etl/load parcels upsert 2026-11-15T00:00:00Z/86400s"),
        ({"checksum": "c", "params": {"srid": 4326}, "shards": 8}, "etl/load parcels upsert"),
    ],
)  # fmt: skip
def test_a_label_tells_versions_and_buckets_apart(more: dict[str, Any], label: str) -> None:
    assert OperationKey(**PARTS, **more).label == label


def test_the_label_of_a_text_key_is_the_text() -> None:
    assert as_key("charge:42 v3").label == "charge:42 v3"


@settings(max_examples=25)
@given(st.dictionaries(st.text(max_size=4), values, max_size=5), st.randoms())
def test_the_order_of_a_dict_does_not_matter(params: dict[str, Any], order: Any) -> None:
    names = list(params)
    order.shuffle(names)
    assert OperationKey(**PARTS, params={name: params[name] for name in names}) == OperationKey(**PARTS, params=params)


seven = st.lists(st.text(min_size=1, max_size=3, alphabet="ab:/1"), min_size=7, max_size=7)


@settings(max_examples=40)
@given(seven, st.data())
def test_no_two_keys_meet_by_being_put_together(parts: list[str], data: Any) -> None:
    other = data.draw(st.permutations(parts) | seven)
    names = ("pipeline", "task", "dataset", "operation", "version", "checksum", "bucket")
    one, two = (OperationKey(**dict(zip(names, given_, strict=True))) for given_ in (parts, other))
    assert (one.digest == two.digest) == (parts == list(other))


def test_a_part_that_is_missing_is_not_one_of_another_name() -> None:
    seen = {OperationKey(**{**PARTS, name: "x"}).digest for name in ("version", "checksum", "bucket")}
    seen |= {OperationKey(**PARTS).digest, OperationKey(**PARTS, params={"version": "x"}).digest}
    assert len(seen) == 5
    assert as_key("etl") != OperationKey(**PARTS)


class Colour(enum.StrEnum):
    RED = "red"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1, 2), [1, 2]), ({3, 1, 2}, frozenset((2, 3, 1))), (0.0, -0.0), (Decimal("1.50"), Decimal("1.5")),
        (Decimal("1E+3"), Decimal(1000)), (Decimal("-0"), Decimal("0.00")), (Colour.RED, "red"),
        (b"x", bytearray(b"x")),
        (datetime(2026, 1, 1, 12, tzinfo=UTC), datetime(2026, 1, 1, 13, tzinfo=timezone(timedelta(hours=1)))),
        (datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=VIENNA), datetime(2026, 10, 25, 1, 30, tzinfo=UTC)),
    ],
)  # fmt: skip
def test_these_are_the_same(one: Any, other: Any) -> None:
    assert canonical.digest(one) == canonical.digest(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 1.0), (1, True), (0, None), (1, "1"), ("", None), ("x", b"x"), ([1], {1}), ([], {}), ([[1], 2], [[1, 2]]),
        (1.0, Decimal(1)), (date(2026, 1, 1), NAIVE), (NAIVE, NAIVE.replace(tzinfo=UTC)),
        (UUID(int=1), UUID(int=1).bytes), (10**30, 10**30 + 1), (0.1 + 0.2, 0.3), ({"a": {"b": 1}}, {"a": {}, "b": 1}),
        (datetime(2026, 10, 25, 2, 30, tzinfo=VIENNA), datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=VIENNA)),
    ],
)  # fmt: skip
def test_these_differ(one: Any, other: Any) -> None:
    assert canonical.digest(one) != canonical.digest(other)


_knot: list[Any] = []
_knot.append(_knot)


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({"a": [1, {"b": math.nan}]}, r"params\['a'\]\[1\]\['b'\] is nan"),
        ({"a": Decimal("sNaN")}, r"params\['a'\] is Decimal"),
        ({"a": object()}, r"params\['a'\] is a object, which has no canonical form"),
        ({"a": {1, 2j}}, r"2j in params\['a'\] is a complex"),
        ({"a": {2j: 1}}, r"the key 2j of params\['a'\] is a complex"),
        ({"a": timedelta(1)}, r"params\['a'\] is a timedelta"),
        ({"a": "\ud800"}, r"params\['a'\] cannot be encoded as UTF-8"),
        ({"a": _knot}, r"nested deeper than 50"),
        ({"a": datetime.min.replace(tzinfo=timezone(timedelta(hours=5)))}, r"params\['a'\] is .* its year is not"),
        ([1], "params must be a dict"),
    ],
)  # fmt: skip
def test_what_has_no_form_is_named(params: Any, told: str) -> None:
    with pytest.raises((ValueError, TypeError), match=told):
        OperationKey(**PARTS, params=params)


@pytest.mark.parametrize("name", ["pipeline", "task", "dataset", "operation", "version", "checksum", "bucket"])
@pytest.mark.parametrize("value", ["", 7, "a\nb", "x" * 201])
def test_a_wrong_part_is_named(name: str, value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{name} must"):
        OperationKey(**{**PARTS, name: value})


@pytest.mark.parametrize("missing", list(PARTS))
def test_a_missing_part_is_named(missing: str) -> None:
    with pytest.raises(TypeError, match=missing):
        OperationKey(**{name: value for name, value in PARTS.items() if name != missing})


def test_a_key_is_the_same_in_another_process_and_for_ever() -> None:
    key = OperationKey(
        **PARTS, version="3", checksum="sha256:00", params={"é": {"x", "y", "z"}, "b": [1.5, None]}, bucket="now"
    )
    script = "import holdfast; print(holdfast.OperationKey(pipeline='etl', task='load', dataset='parcels', "
    script += "operation='upsert', version='3', checksum='sha256:00', bucket='now', params={'b': (1.5, None), "
    script += "'é': {'z', 'y', 'x'}}).digest)"
    env = {**os.environ, "PYTHONHASHSEED": "77", "PYTHONIOENCODING": "utf-8"}
    told = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == key.digest == "bf8adb09bea2d22c60b5749770d74d18ddde1e733b46f570524697109ef548e1"
    assert as_key("charge:42").digest == "9dff613b7f78cacb5c26dcbb28f93d56f0ba78554ebef7c6e3a054701d3fcd98"
    assert lock_key("parcels", "upsert") == 2208814133616697911


def test_params_may_be_changed_afterwards_and_the_key_stays_what_it_is() -> None:
    params = {"a": 1}
    key = OperationKey(**PARTS, params=params)
    before = key.digest
    params["a"] = 2
    assert key.digest == before
    assert len({key, OperationKey(**PARTS, params={"a": 1})}) == 1


def test_a_hash_of_params_stands_for_them_until_they_are_replaced() -> None:
    known = OperationKey(**PARTS, params={"srid": 4326})
    given = OperationKey(**PARTS, params_hash=known.params_hash)
    assert (given, given.lock_key, given.label) == (known, known.lock_key, known.label)
    for copy in (pickle.loads(pickle.dumps(given)), deepcopy(given), replace(given)):
        assert (copy, copy.params_hash) == (known, known.params_hash)
    assert replace(given, bucket="b", shards=4) == OperationKey(**PARTS, params={"srid": 4326}, bucket="b")
    for key in (given, known):
        assert replace(key, params={}) == OperationKey(**PARTS)
        assert replace(key, params={"srid": 1}) == OperationKey(**PARTS, params={"srid": 1})
        with pytest.raises(ValueError, match="params_hash"):
            replace(key, params_hash="0" * 64)  # params would not belong to it
    for wrong in ("", "0" * 63, "A" * 64, "sha256:" + "0" * 57, b"0" * 64, 7):
        with pytest.raises((TypeError, ValueError), match="params_hash must be"):
            OperationKey(**PARTS, params_hash=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pass one of them"):
        OperationKey(**PARTS, params={"srid": 4326}, params_hash=known.params_hash)


def test_a_lock_is_of_dataset_and_operation_and_shard() -> None:
    one = OperationKey(**PARTS, params={"n": 1})
    assert one.lock_key == OperationKey(**{**PARTS, "task": "other"}, params={"n": 2}).lock_key
    assert one.lock_key != OperationKey(**{**PARTS, "dataset": "other"}).lock_key
    assert -(2**63) <= one.lock_key < 2**63
    spread = [OperationKey(**PARTS, params={"n": n}, shards=4) for n in range(200)]
    assert {key.shard for key in spread} == {0, 1, 2, 3}
    assert len({key.lock_key for key in spread}) == 4
    assert spread[1].digest == one.digest, "how many locks there are is no part of what is done"
    one._check_whole()
    with pytest.raises(ValueError, match=r"'parcels' is sovereign and is locked as a whole"):
        spread[0]._check_whole()


@pytest.mark.parametrize("shards", [0, -1, 1025, True, 1.5])
def test_wrong_shards_are_named(shards: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="shards must be"):
        OperationKey(**PARTS, shards=shards)


def test_a_plain_key_is_its_text() -> None:
    assert as_key("charge:42") == PlainKey("charge:42")
    assert as_key(key := OperationKey(**PARTS)) is key
    assert as_key("a").digest != as_key("b").digest
    assert as_key(key.digest).digest == key.digest, "as a listing shows it"
    assert as_key(key.digest[:-1]).digest != key.digest[:-1]
    for wrong, told in (("", "key must have 1 to 200"), (7, "key must be a str or an OperationKey, not int")):
        with pytest.raises((ValueError, TypeError), match=told):
            as_key(wrong)


NOON = datetime(2026, 11, 15, 12, 34, 56, 789, tzinfo=UTC)


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (3600, "2026-11-15T12:00:00Z/3600s"), (timedelta(hours=1), "2026-11-15T12:00:00Z/3600s"),
        (86400, "2026-11-15T00:00:00Z/86400s"), (timedelta(weeks=1), "2026-11-09T00:00:00Z/604800s"),
        (0.25, "2026-11-15T12:34:56Z/0.250000s"),
    ],
)  # fmt: skip
def test_buckets_of_time_in_utc(every: Any, expected: str) -> None:
    assert time_bucket(NOON, every) == expected
    assert time_bucket(NOON.astimezone(VIENNA), every) == expected, "the zone it is said in does not matter"


def test_days_of_a_zone_are_as_long_as_they_are_there() -> None:
    day = datetime(2026, 10, 25, tzinfo=VIENNA)
    hours = [day.astimezone(UTC) + timedelta(hours=n) for n in range(-1, 26)]
    buckets = [time_bucket(hour, timedelta(days=1), zone=VIENNA) for hour in hours]
    assert buckets.count("2026-10-25[Europe/Vienna]/86400s") == 25
    assert time_bucket(NOON, 86400, zone=timezone.utc) == "2026-11-15[UTC]/86400s"  # noqa: UP017


@given(st.datetimes(min_value=datetime(1970, 1, 1), timezones=st.just(UTC)), st.integers(1, 10**7))  # noqa: DTZ001
def test_every_instant_is_in_one_bucket_that_begins_before_it(when: datetime, every: int) -> None:
    begin = datetime.fromisoformat(time_bucket(when, every).partition("/")[0])
    assert begin <= when < begin + timedelta(seconds=every)
    assert time_bucket(begin, every) == time_bucket(when, every)


class Nameless(tzinfo):
    def utcoffset(self, when: datetime | None) -> timedelta:
        return timedelta(0)

    def dst(self, when: datetime | None) -> timedelta:
        return timedelta(0)

    def tzname(self, when: datetime | None) -> str:
        return "nameless"


@pytest.mark.parametrize(
    ("when", "every", "zone", "told"),
    [
        (NOON, 0, None, "every must be more than 0, not 0"), (NOON, -1, None, "every must be more than 0"),
        (NOON, timedelta(0), None, "every must be more than 0"), (NOON, math.nan, None, "every must be a length"),
        (NOON, math.inf, None, "every must be a length"), (NOON, True, None, "every must be seconds"),
        (NOON, "1h", None, "every must be seconds or a timedelta, not str"),
        (NAIVE, 60, None, "when must have a time zone"), (date(2026, 1, 1), 60, None, "when must be a"),
        (NOON, 3600, VIENNA, "every must be whole days with a zone"),
        (NOON, 86400, Nameless(), "zone must have a name"),
        (datetime.min.replace(tzinfo=VIENNA), 60, None, "in UTC its year is not between 1 and 9999"),
    ],
)  # fmt: skip
def test_a_wrong_bucket_is_named(when: Any, every: Any, zone: Any, told: str) -> None:
    with pytest.raises((ValueError, TypeError), match=told):
        time_bucket(when, every, zone=zone)


def test_a_file_has_the_checksum_that_others_compute(tmp_path: Path) -> None:
    file = tmp_path / "parcels.bin"
    file.write_bytes(b"x" * (5 * 1024 * 1024 // 2))
    seen: list[tuple[int, int]] = []
    checksum = checksum_file(file, progress=lambda done, total: seen.append((done, total)))
    told = subprocess.run(["sha256sum", file], capture_output=True, text=True, check=True)
    assert checksum == f"sha256:{told.stdout.split()[0]}"
    assert [done for done, _ in seen] == [0, 1 << 20, 2 << 20, 5 << 19]
    assert {total for _, total in seen} == {5 << 19}
    file.write_bytes(b"")
    assert checksum_file(str(file)) == f"sha256:{sha256().hexdigest()}"
    with pytest.raises(FileNotFoundError):
        checksum_file(tmp_path / "none")
    with pytest.raises(IsADirectoryError):
        checksum_file(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    for endless in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(ValueError, match="is not a regular file"):
            checksum_file(endless)


def test_a_file_that_is_written_to_meanwhile_has_none(tmp_path: Path) -> None:
    file = tmp_path / "parcels.bin"
    file.write_bytes(b"x" * 100)

    def write(done: int, total: int) -> None:
        if not done:
            file.write_bytes(b"y" * 200)

    with pytest.raises(ValueError, match="was written to while it was read"):
        checksum_file(file, progress=write)
