"""Flags, then the environment, then the file; all mistakes at once, and no secret among them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.gateway import tokens
from holdfast.gateway.settings import Settings, SettingsError, load
from holdfast.lineage.jsonlines import JsonLines
from tests.cli.command import call

SECRET, OTHER = "s3cret-of-sixteen-or-more", "another-secret-of-sixteen"


def made(
    flags: dict[str, Any] | None = None, environment: dict[str, str] | None = None, table: dict[str, Any] | None = None
) -> Settings:
    return load("sqlite:///a.db", "holdfast", flags or {}, environment or {}, table or {})


def test_without_a_word_it_is_a_laptop() -> None:
    found = made()
    assert (found.host, found.port, found.loopback, found.single, found.tokens) == ("127.0.0.1", 7411, True, True, ())
    assert found.pools == {"default": 8}


def test_a_flag_counts_before_the_environment_and_that_before_the_file() -> None:
    table = {"port": 1, "stop_within": 3, "writes": 10, "pools": {"gpu": 2}, "hosts": ["a.example"]}
    found = made({"port": "3", "pools": ()}, {"HOLDFAST_PORT": "2", "HOLDFAST_STOP_WITHIN": "4"}, table)
    assert (found.port, found.stop_within, found.writes) == (3, 4.0, 10.0)
    assert (found.pools, found.hosts) == ({"gpu": 2}, ("a.example",))
    assert made({"end_sandboxes": False}, {"HOLDFAST_END_SANDBOXES": "yes"}).end_sandboxes
    assert made({"pools": ("a=1", "b=2")}, {"HOLDFAST_POOLS": "c=3"}).pools == {"a": 1, "b": 2}
    assert made({}, {"HOLDFAST_POOLS": "a=1, b=2", "HOLDFAST_HOSTS": "One.example, two.example."}) == made(
        {}, {}, {"pools": {"a": 1, "b": 2}, "hosts": ["one.example", "two.example"]}
    )


def test_a_webhook_has_a_url_and_a_secret(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    target = made({"webhook": "https://hooks.example/x", "webhook_secret_file": str(tmp_path / "secret")}).webhook
    assert target is not None
    assert (target.url, target.secret) == ("https://hooks.example/x", SECRET)
    assert made({}, {"HOLDFAST_WEBHOOK_SECRET": SECRET}, {"webhook": target.url}).webhook == target
    for environment in ({}, {"HOLDFAST_WEBHOOK_SECRET": "short"}):
        with pytest.raises(SettingsError, match=r"webhook: .* at least 16 characters"):
            made({"webhook": target.url}, environment)
    with pytest.raises(SettingsError, match=r"webhook: .* must be a URL"):
        made({"webhook": f"https://me:{OTHER}@hooks.example"}, {"HOLDFAST_WEBHOOK_SECRET": SECRET})
    with pytest.raises(SettingsError, match=r"webhook: .* cannot be read: No such file"):
        made({"webhook": target.url, "webhook_secret_file": str(tmp_path / "none")})


def test_every_mistake_is_told_at_once_and_no_secret(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(f"alice operate {SECRET}\nbob write {OTHER}\ncarol read short\nonly\n")
    flags = {"port": "99999", "host": "0.0.0.0", "driver": f"http://me:{SECRET}@host", "pools": ("x",)}
    environment = {
        "HOLDFAST_WRITES": "many",
        "HOLDFAST_TOKENS_FILE": str(tmp_path / "tokens"),
        "HOLDFAST_ADVERTISE": "",
        "HOLDFAST_RELAY": f"catalogue=nowhere:http://me:{SECRET}@host",
    }
    with pytest.raises(SettingsError) as caught:
        made(flags, environment, {"stop_within": 0, "hosts": ["no spaces"], "colour": "red", "end_sandboxes": 3})
    told = str(caught.value)
    for place in (
        "'colour'", "--port", "--driver:", "--pools", "HOLDFAST_WRITES", "HOLDFAST_TOKENS_FILE: line 2", "line 3",
        "line 4", "HOLDFAST_ADVERTISE", "HOLDFAST_RELAY", "stop_within in [gateway]", "hosts in [gateway]",
        "end_sandboxes",
    ):  # fmt: skip
        assert place in told
    assert not any(each in told for each in (SECRET, OTHER, "short"))


def test_a_relay_has_a_name_and_a_sink(tmp_path: Path) -> None:
    relay = made({"relay": f"catalogue=jsonl:{tmp_path / 'lineage.jsonl'}"}).relay
    assert relay is not None
    assert (relay[0], type(relay[1])) == ("catalogue", JsonLines)
    for wrong, said in (
        ("=jsonl:file", "NAME=SINK"), ("a b=jsonl:f", "NAME=SINK"), ("r=", "NAME=SINK"), ("r=x", "a sink is"),
    ):  # fmt: skip
        with pytest.raises(SettingsError, match=f"relay in .gateway.: .*{said}"):
            made(table={"relay": wrong})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "gw.example"])
def test_elsewhere_than_on_loopback_tokens_are_needed(host: str) -> None:
    with pytest.raises(SettingsError, match=r"not a loopback address.*Set tokens"):
        made({"host": host})
    found = made({"host": host}, {"HOLDFAST_TOKENS": f"alice operate {SECRET}; bob read {OTHER}"})
    assert [(each.name, each.scope) for each in found.tokens] == [("alice", "operate"), ("bob", "read")]
    assert SECRET not in repr(found)


def test_tokens_of_file_and_environment_are_both_good_and_none_twice(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(f"# who may what\nalice operate {SECRET}  # her own\n\n")
    found = made({"tokens_file": str(tmp_path / "tokens")}, {"HOLDFAST_TOKENS": f"bob read {OTHER}"})
    assert [each.name for each in found.tokens] == ["alice", "bob"]
    [token] = tokens.parse(f"alice operate {SECRET}#more  # and a word")
    assert token.secret == f"{SECRET}#more", "nothing of a secret is cut off"
    for text in (f"a read {SECRET}\nb read {SECRET}", f"a read {SECRET}\na operate {OTHER}", "", "# nothing"):
        with pytest.raises(ValueError, match=r"already|no token"):
            tokens.parse(text)


@pytest.mark.parametrize(
    ("header", "secret"),
    [
        ("Bearer abc", "abc"), ("bearer  abc ", "abc"), ("Basic dTphOmI=", "a:b"), ("Basic dTo=", ""),
        ("Basic ???", None), ("Basic /w==", None), ("Digest abc", None), ("", None), ("Bearer", ""),
    ],
)  # fmt: skip
def test_a_token_is_a_bearers_or_a_password(header: str, secret: str | None) -> None:
    assert tokens.secret_in_header(header) == secret


def test_only_the_whole_secret_is_known() -> None:
    mine = tokens.Token("alice", "operate", SECRET)
    assert tokens.find(SECRET, [tokens.Token("bob", "read", OTHER), mine]) is mine
    for other in (SECRET[:-1], SECRET + "x", "", SECRET.upper(), "\udcff"):
        assert tokens.find(other, [mine]) is None


def test_the_command_tells_all_mistakes_with_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "holdfast.toml").write_text('url = "sqlite:///a.db"\n[gateway]\nstop_within = "soon"\nport = true\n')
    done = call("serve", "--host", "0.0.0.0", "--writes", "-1", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    for told in ("stop_within in [gateway]", "port in [gateway]", "--writes", "loopback"):
        assert told in done.stderr
    assert not (tmp_path / "a.db").exists()
    (tmp_path / "holdfast.toml").write_text("gateway = 3")
    assert "must be a table" in call("serve", cwd=tmp_path).stderr
