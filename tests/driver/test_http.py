"""The way in: strict about what it takes, bounded, and silent about itself to those who may not ask."""

from __future__ import annotations

import json
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.driver.daemon import DriverSettings
from holdfast.driver.spec import BadSpec, parse
from tests.children import PATIENCE, eventually
from tests.cli.command import call
from tests.driver.daemon import Daemon

TOKEN = "a-token-that-nobody-guesses"
SLOW = [HealthCheck.too_slow]
"""How fast the machine makes examples says nothing about them."""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One for all that cannot harm it."""
    with Daemon(tmp_path_factory.mktemp("http") / "d") as running:
        yield running


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def problem(answer: bytes) -> dict[str, object]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"Content-Type: application/problem+json" in head, answer
    value: dict[str, object] = json.loads(body)
    assert {"type", "title", "status", "detail"} <= value.keys()
    return value


def put(id: str, body: bytes, *headers: bytes) -> bytes:
    lines = [b"PUT /v1/sandboxes/%s HTTP/1.1" % id.encode(), b"Host: x", b"Connection: close", *headers]
    if not any(each.lower().startswith(b"content-type") for each in headers):
        lines.append(b"Content-Type: application/json")
    return b"\r\n".join([*lines, b"Content-Length: %d" % len(body)]) + b"\r\n\r\n" + body


GET = b"GET /v1/sandboxes HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (b"hello\r\n\r\n", 400),
        (b"GET  /v1/health HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"get /v1/health HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET /v1/health HTTP/2.0\r\nHost: x\r\n\r\n", 400),
        (b"GET /v1/health HTTP/1.1\r\n\r\n", 400),
        (b"GET /v1/health HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400),
        (b"GET /v1/health HTTP/1.1\r\nHost : x\r\n\r\n", 400),
        (b"GET /v1/health HTTP/1.1\r\nHost: x\r\n folded\r\n\r\n", 400),
        (b"GET /v1/health HTTP/1.1\r\nHost: x\r\nA: b\r\n\tfolded\r\n\r\n", 400),
        (b"GET /v1/health HTTP/1.1\nHost: x\n\n", 400),
        (b"GET /v1/health HTTP/1.1\r\nHost: x\nA: b\r\n\r\n", 400),
        (b"GET /v1/health HTTP/1.1\r\nHost: x\r\nA: b\n\r\n", 400),
        (b"GET /v1/health HTTP/1.1\r\nHost: x\r\nA: \x00\r\n\r\n", 400),
        (GET + b"A: " + b"a" * 20_000 + b"\r\n\r\n", 431),
        (GET + b"A: a\r\n" * 3_000 + b"\r\n", 431),
        (GET + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 501),
        (GET + b"Content-Length: -1\r\n\r\n", 400),
        (GET + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab", 400),
        (GET + b"Content-Length: 9999999\r\n\r\n", 413),
        (GET + b"Origin: http://evil.example\r\n\r\n", 403),
        (GET.replace(b"sandboxes", b"nowhere") + b"\r\n", 404),
        (GET.replace(b"sandboxes", b"sandboxes/.."), 404),
        (GET.replace(b"sandboxes", b"sandboxes/a%2Flog") + b"\r\n", 404),
        (GET.replace(b"sandboxes", b"sandboxes?x=1") + b"\r\n", 400),
        (GET.replace(b"sandboxes", b"sandboxes?x") + b"\r\n", 400),
        (GET.replace(b"sandboxes", b"watch?since=x") + b"\r\n", 400),
        (GET.replace(b"sandboxes", b"watch?since=x&since=y") + b"\r\n", 400),
        (GET.replace(b"sandboxes", b"watch?since=00.1") + b"\r\n", 410),
        (GET.replace(b"GET", b"POST") + b"\r\n", 405),
        (GET.replace(b"GET", b"__init__".upper()) + b"\r\n", 400),
        (GET.replace(b"GET", b"DELETE").replace(b"sandboxes", b"sandboxes/a?grace=nan") + b"\r\n", 400),
        (GET.replace(b"GET", b"DELETE").replace(b"sandboxes", b"sandboxes/a?grace=-1") + b"\r\n", 400),
        (GET.replace(b"GET", b"DELETE").replace(b"sandboxes", b"sandboxes/a") + b"\r\n", 404),
        (put("a", b"{"), 400),
        (put("a", b"\xff"), 400),
        (put("a", b"[" * 100_000), 400),
        (put("a", b'{"argv": ["true"], "argv": ["false"]}'), 400),
        (put("a", b'{"argv": ["true"], "grace": NaN}'), 400),
        (put("a", b"argv=true", b"Content-Type: application/x-www-form-urlencoded"), 415),
        (put("a", b"{}"), 422),
        (put(".a", b'{"argv": ["true"]}'), 400),
        (put("a" * 129, b'{"argv": ["true"]}'), 400),
    ],
)
def test_what_is_wrong_or_ambiguous_is_refused_with_a_problem(
    raw: Callable[[bytes], bytes], daemon: Daemon, request_: bytes, expected: int
) -> None:
    if not request_.endswith(b"\r\n\r\n") and b"\r\n\r\n" not in request_:
        request_ += b"\r\n"
    answer = raw(request_)
    assert status(answer) == expected, answer
    assert problem(answer)["status"] == expected
    assert b"Traceback" not in answer
    assert daemon.client().list() == []


def test_all_mistakes_of_a_spec_are_listed_at_once(raw: Callable[[bytes], bytes]) -> None:
    spec = {
        "argv": ["", 1], "env": {"A B": "x", "OK": 2, "HOLDFAST_SANDBOX": "x"}, "cwd": "here", "grace": "1",
        "limits": {"memory_bytes": 0, "cpu_seconds": True, "speed": 1}, "log_bytes": 1, "image": "x",
    }  # fmt: skip
    found = problem(raw(put("a", json.dumps(spec).encode())))
    errors = found["errors"]
    assert isinstance(errors, list)
    places = {each.partition(":")[0] for each in errors}
    assert places == {
        "argv[1]", "env", "env.OK", "env.HOLDFAST_SANDBOX", "cwd", "grace", "limits.memory_bytes", "limits.cpu_seconds",
        "limits.speed", "log_bytes", "image",
    }  # fmt: skip
    assert found["requestId"]


def test_a_body_that_is_too_large_is_heard_out_so_that_its_sender_learns_why(daemon: Daemon) -> None:
    with pytest.raises(holdfast.DriverError, match="the body is larger than 1048576 bytes") as refused:
        daemon.client().create("a", ["echo", *["x" * 100_000] * 50])
    assert refused.value.status == 413


def test_a_connection_serves_many_requests_and_a_slow_one_arrives_whole(daemon: Daemon) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.settimeout(PATIENCE)
        line.connect(str(daemon.folder / "driver.sock"))
        asked = b"GET /v1/health HTTP/1.1\r\nHost: x\r\n\r\n"
        for byte in asked:
            line.sendall(bytes([byte]))
        line.sendall(asked * 2)
        answer = b""
        while answer.count(b'"status": "ok"') < 3:
            received = line.recv(65536)
            assert received, answer
            answer += received


def test_streams_leave_room_for_whoever_asks_a_question(start: Callable[..., Daemon]) -> None:
    """Logs that are followed, say: whoever may read them could keep all the others out."""
    daemon = start()  # no other has a stream there
    with ExitStack() as lines:

        def watch() -> int:
            line = lines.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            line.settimeout(PATIENCE)
            line.connect(str(daemon.folder / "driver.sock"))
            line.sendall(b"GET /v1/watch HTTP/1.1\r\nHost: x\r\n\r\n")
            return status(line.recv(100))

        assert [watch() for _ in range(514)] == [200] * 256 + [503] * 258, "some are left for questions"
        assert daemon.client().list() == []


def test_clients_without_the_token_keep_nobody_out_and_are_soon_closed(start: Callable[..., Daemon]) -> None:
    """Silent ones, those that send half a head, and those with a wrong token and a body that never comes."""
    soon = "from holdfast.driver import http; http.ADMITTED_WITHIN = http.READ_WITHIN = 2.0"
    daemon = start("--port", "0", before=soon, HOLDFAST_DRIVER_TOKEN=TOKEN)
    where = urlsplit(daemon.address)
    wrong = (
        b"PUT /v1/sandboxes/a HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer x\r\nContent-Length: 1000000\r\n\r\n"
    )
    files = Path(f"/proc/{daemon.process.pid}/fd")
    client = daemon.client(token=TOKEN)
    client.create("a", ["sleep", "1000"])
    watch = client.watch()
    next(watch)
    before = len([*files.iterdir()])
    with ExitStack() as strangers:
        for number in range(600):
            line = strangers.enter_context(socket.create_connection(("127.0.0.1", where.port or 0), timeout=PATIENCE))
            with suppress(OSError):  # it was closed already
                line.sendall((b"", b"GET /v1/health HTT", wrong)[number % 3])
            if number % 50 == 0:
                assert [each.id for each in client.list()] == ["a"]
        eventually(lambda: len([*files.iterdir()]) <= before, "each is closed")
        client.create("b", ["true"])
        while (seen := next(watch)) is None or seen.id != "b":
            pass
        watch.close()


def test_the_socket_and_everything_in_the_folder_are_for_its_owner_alone(daemon: Daemon) -> None:
    assert stat.S_IMODE((daemon.folder / "driver.sock").stat().st_mode) == 0o600
    assert stat.S_IMODE(daemon.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((daemon.folder / "sandboxes").stat().st_mode) == 0o700


def test_on_a_port_the_token_is_needed_and_the_host_must_be_one_of_its_names(
    start: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = start("--port", "0", HOLDFAST_DRIVER_TOKEN=f"{TOKEN}\n")  # a variable that is made of a file has the end
    assert daemon.client(token=TOKEN).list() == []
    with monkeypatch.context() as environment:
        environment.setenv("HOLDFAST_DRIVER_TOKEN", f"{TOKEN}\n")
        assert daemon.client().list() == []
    for wrong in (None, "x", TOKEN[:-1], TOKEN + "x"):
        with pytest.raises(holdfast.DriverError, match="a token is needed") as refused:
            daemon.client(token=wrong).list()
        assert refused.value.status == 401
    where = urlsplit(daemon.address)
    assert where.hostname == "127.0.0.1"
    for host, expected in (("localhost", 200), ("127.0.0.1:1", 200), ("evil.example", 421), ("127.0.0.1.evil", 421)):
        with socket.create_connection(("127.0.0.1", where.port or 0)) as line:
            head = f"GET /v1/sandboxes HTTP/1.0\r\nHost: {host}\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
            line.sendall(head.encode())
            assert status(line.makefile("rb").read()) == expected
    assert TOKEN not in daemon.said()


@pytest.mark.parametrize(
    ("options", "more", "said"),
    [
        (("--port", "0", "--host", "0.0.0.0"), {}, "not a loopback address"),
        (("--port", "0", "--host", "0.0.0.0"), {"HOLDFAST_DRIVER_TOKEN": "short"}, "at least 16"),
        (("--port", "0", "--socket", "x.sock"), {}, "use either --socket or --port"),
        (("--socket", "x" * 200), {}, "longer than 107 bytes"),
        (("--limit", "0"), {}, "--limit"),
        (("--port", "1", "ls"), {}, "HOLDFAST_DRIVER"),
    ],
)
def test_called_wrongly_it_does_not_start_and_says_why(
    options: tuple[str, ...], more: dict[str, str], said: str, tmp_path: Path
) -> None:
    done = call("driver", *options, cwd=tmp_path, **more)
    assert done.returncode == 2
    assert said in done.stderr
    assert not (tmp_path / "holdfast-driver").exists()


def test_a_place_that_is_taken_is_refused_and_the_socket_of_a_dead_driver_is_not(
    daemon: Daemon, tmp_path: Path
) -> None:
    taken = call("driver", "--folder", str(tmp_path / "e"), "--socket", str(daemon.folder / "driver.sock"))
    assert taken.returncode == 1
    assert "another process listens" in taken.stderr
    (tmp_path / "file").write_text("mine")
    precious = call("driver", "--folder", str(tmp_path / "e"), "--socket", str(tmp_path / "file"))
    assert precious.returncode == 1
    assert (tmp_path / "file").read_text() == "mine"
    (tmp_path / "e" / "sandboxes").write_text("no folder")
    unusable = call("driver", "--folder", str(tmp_path / "e"))
    assert (unusable.returncode, unusable.stderr) == (
        2, f"holdfast: cannot write to the folder {tmp_path / 'e'}: File exists. Give another --folder\n"
    )  # fmt: skip
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(tmp_path / "dead"))
    with Daemon(tmp_path / "f", "--socket", str(tmp_path / "dead")) as other:
        assert other.client().list() == []


def test_bytes_that_make_no_sense_never_harm_it(raw: Callable[[bytes], bytes], daemon: Daemon) -> None:
    @settings(max_examples=60, deadline=None, database=None, derandomize=True, suppress_health_check=SLOW)
    @given(st.binary(max_size=200), st.sampled_from([b"", GET, b"PUT /v1/sandboxes/a HTTP/1.1\r\nHost: x\r\n"]))
    def speak(noise: bytes, before: bytes) -> None:
        answer = raw(before + noise + b"\r\n\r\n\r\n\r\n")
        assert answer == b"" or 200 <= status(answer) < 500

    speak()
    assert daemon.client().list() == []
    assert '"failure"' not in daemon.said()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = ("argv", "env", "cwd", "limits", "grace", "log_bytes", "more")


@settings(max_examples=100, deadline=None, database=None, derandomize=True, suppress_health_check=SLOW)
@given(st.dictionaries(st.sampled_from(FIELDS), JSON | st.lists(st.text(max_size=3), min_size=1), max_size=5) | JSON)
def test_a_spec_is_understood_or_its_mistakes_are_named(body: object) -> None:
    try:
        spec = parse(body)
    except BadSpec as bad:
        event(f"{min(len(bad.mistakes), 3)} mistakes")
    else:
        assert parse(spec) == spec, "with its defaults it is the same spec"
        assert Path(spec["cwd"] or "/").is_absolute()


@pytest.mark.parametrize(
    ("host", "loopback"), [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True),
                           ("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("example.org", False)]
)  # fmt: skip
def test_loopback_is_known(host: str, loopback: bool) -> None:
    assert DriverSettings(Path("x"), host=host).loopback is loopback
