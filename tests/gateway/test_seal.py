"""Secrets in the database are sealed, with a key that is not in it, and open nowhere but in their own record."""

from __future__ import annotations

import base64
import fcntl
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.gateway.seal import Seal, open_seal, parse_keys
from holdfast.gateway.settings import Settings, SettingsError, load
from holdfast.problem_json import Problem
from tests.children import PATIENCE, eventually, query
from tests.conftest import fresh
from tests.gateway.local_replica import open_local_replica
from tests.gateway.replicas import Replica

SECRET = "the-api-key-of-a-sandbox"
KEY, OTHER = (base64.b64encode(bytes([number]) * 32).decode() for number in (250, 2))
REMOTE = {"host": "0.0.0.0", "tokens_file": "tokens"}


def keys(*given: str) -> tuple[str, ...]:
    return parse_keys("\n".join(given))


def test_what_is_sealed_opens_with_its_key_and_in_its_place_alone() -> None:
    old, new, rotated = (Seal(keys(*given)) for given in ((OTHER,), (KEY,), (KEY, OTHER)))
    for data in (b"", SECRET.encode(), bytes(range(256)) * 4096, b"sealed:x", b"plain:x"):
        sealed = old.close(data, "here")
        assert len(sealed) <= len(data) * 4 / 3 + 1000
        assert data == b"" or data not in sealed.removeprefix(b"sealed:")
        assert old.open(sealed, "here") == rotated.open(sealed, "here") == data
        assert new.open(rotated.close(data, "here"), "here") == data
        for seal, where in ((new, "here"), (Seal(()), "here"), (old, "there")):
            with pytest.raises(Problem, match="sealed"):
                seal.open(sealed, where)
        with pytest.raises(Problem):
            old.open(sealed[:-1], "here")
        unsealed = Seal(()).close(data, "here")
        assert Seal(()).open(unsealed, "here") == new.open(unsealed, "here") == data


def test_two_first_starts_make_one_key(tmp_path: Path) -> None:
    """The second one waits until the first has written it."""
    settings, ready = Settings(f"sqlite:///{tmp_path / 'app.db'}"), Seal(keys(KEY))
    with holdfast.Client(settings.url), (tmp_path / "app.db.holdfast-key").open("w") as file:
        os.fchmod(file.fileno(), 0o600)
        fcntl.flock(file, fcntl.LOCK_EX)
        with ThreadPoolExecutor(1) as pool:
            second = pool.submit(open_seal, settings)
            eventually(lambda: second.done() or is_waited_for(file.fileno()), "the second one has begun")
            file.write(KEY)
            file.flush()
            fcntl.flock(file, fcntl.LOCK_UN)
            assert second.result(PATIENCE).open(ready.close(b"x", "here"), "here") == b"x"


def is_waited_for(descriptor: int) -> bool:
    inode = f":{os.fstat(descriptor).st_ino} "
    return any("->" in line and inode in line for line in Path("/proc/locks").read_text().splitlines())


def test_a_key_is_refused_by_what_is_wrong_with_it_and_not_repeated(tmp_path: Path) -> None:
    assert keys(KEY) == keys(KEY.replace("+", "-").replace("/", "_")) == keys(f" {KEY}\n")
    for text in ("", "short", KEY[:-4], "ü" * 44, f"{KEY}\n{SECRET}"):
        with pytest.raises(ValueError, match="openssl rand -base64 32") as caught:
            parse_keys(text)
        assert text == "" or not any(word in str(caught.value) for word in text.split())
    (tmp_path / "key").write_text(f"{KEY}\n{OTHER}\n")
    flags = {"key_file": str(tmp_path / "key")}
    assert load("sqlite:///a.db", "holdfast", flags, {}, {}).keys == keys(KEY, OTHER)
    both = load("sqlite:///a.db", "holdfast", flags, {"HOLDFAST_KEY": OTHER}, {})
    assert (both.keys, KEY in repr(both)) == (keys(KEY, OTHER, OTHER), False)
    for given in ({"HOLDFAST_KEY": "short"}, {"HOLDFAST_KEY_FILE": str(tmp_path)}):
        with pytest.raises(SettingsError, match="HOLDFAST_KEY"):
            load("sqlite:///a.db", "holdfast", {}, given, {})


def test_beyond_loopback_a_key_is_needed_where_there_is_no_file_for_one(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("ops operate a-secret-of-operators\n")
    remote = {**REMOTE, "tokens_file": str(tmp_path / "tokens")}
    with pytest.raises(SettingsError, match=r"readable in the database\. Set a key"):
        load("postgresql://db/app", "holdfast", remote, {}, {})
    load("postgresql://db/app", "holdfast", remote, {"HOLDFAST_KEY": KEY}, {})
    load("postgresql://db/app", "holdfast", {}, {}, {})
    load("sqlite:///a.db", "holdfast", remote, {}, {})


def test_on_sqlite_the_first_start_makes_a_key_for_its_owner_alone(tmp_path: Path) -> None:
    settings = Settings(f"sqlite:///{tmp_path / 'app.db'}")
    before = os.umask(0)
    try:
        sealed = open_seal(settings).close(b"x", "here")
    finally:
        os.umask(before)
    path = tmp_path / "app.db.holdfast-key"
    assert path.stat().st_mode & 0o777 == 0o600
    assert open_seal(settings).open(sealed, "here") == b"x", "the next start has the same"
    path.write_text(f"{KEY}\n{path.read_text()}")
    rotated = open_seal(settings)
    assert rotated.open(sealed, "here") == Seal(keys(KEY)).open(rotated.close(b"x", "here"), "here") == b"x"
    path.chmod(0o640)
    with pytest.raises(holdfast.HoldfastError, match=r"of mode 0600"):
        open_seal(settings)
    path.chmod(0o600)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(holdfast.HoldfastError, match="cannot be used"):
        open_seal(settings)
    path.unlink()
    path.write_text("not a key")
    path.chmod(0o600)
    with pytest.raises(holdfast.HoldfastError, match="not 32 bytes in base64"):
        open_seal(settings)


def test_a_program_gets_its_variables_and_no_file_of_the_database_has_them(replica: Replica, folder: Path) -> None:
    program = {"id": "keyed", "argv": ["sh", "-c", 'echo "<$API_KEY>"; sleep 1000'], "env": {"API_KEY": SECRET}}
    made = replica.http.post("/sandboxes", json=program, headers={"Idempotency-Key": "once"})
    assert (made.status_code, made.json()["spec"]["env"]) == (201, ["API_KEY"])
    eventually(lambda: replica.http.get("/sandboxes/keyed/log").text == f"<{SECRET}>\n", what="its output")
    assert [event["path"] for event in replica.events("gateway.key")] == [str(folder / "app.db.holdfast-key")]
    files = list(folder.glob("app.db*"))
    assert {"app.db", "app.db.holdfast-key"} <= {path.name for path in files}
    assert not any(SECRET.encode() in path.read_bytes() for path in files)
    with holdfast.Client(replica.url) as client:
        record: Any = client.objects.get("@sandbox", "keyed")
        assert record.payload["spec"]["env"]["API_KEY"].startswith("sealed:")


def test_on_postgresql_a_replica_without_a_key_says_that_nothing_is_sealed(tmp_path: Path) -> None:
    for key, warned in ((None, True), (KEY, False)):
        variables = {} if key is None else {"HOLDFAST_KEY": key}
        with Replica(fresh(), tmp_path, name=f"warned-{warned}", **variables) as made:
            assert [each["level"] for each in made.events("gateway.unsealed")] == ["warning"] * warned
            assert made.events("gateway.key") == []


async def test_tokens_of_slots_and_kept_answers_are_sealed(postgres_url: str, tmp_path: Path) -> None:
    new: dict[str, Any] = {"json": {"pool": "default"}, "headers": {"Idempotency-Key": "once"}}
    async with open_local_replica(postgres_url, tmp_path, keys=keys(KEY)) as local:
        made = await local.http.post("/sessions", **new)
        id = made.json()["id"]
        [(body,)] = query(postgres_url, "select body from holdfast.object where type = '@session'")
        [(token,)] = query(postgres_url, "select token::text from holdfast.lease where name like '@slot:%%'")
        assert (token in body, json.loads(body)["token"].startswith("sealed:")) == (False, True)
        rows = query(postgres_url, "select l::text from holdfast.idempotency_log l")
        assert (len(rows), id in str(rows), id.encode().hex() in str(rows)) == (1, False, False)
        again = await local.http.post("/sessions", **new)
        assert (again.content, again.headers["idempotent-replayed"]) == (made.content, "true")
        assert (await local.http.post(f"/sessions/{id}/heartbeat")).status_code == 200
    async with open_local_replica(postgres_url, tmp_path, keys=keys(OTHER)) as local:
        for answer in (
            await local.http.post("/sessions", **new),
            await local.http.post(f"/sessions/{id}/heartbeat"),
        ):
            assert (answer.status_code, "a key that this replica does not have" in answer.text) == (503, True)
    async with open_local_replica(postgres_url, tmp_path, keys=keys(OTHER, KEY)) as local:
        assert (await local.http.post(f"/sessions/{id}/end", json={"state": "STOPPED"})).status_code == 200
