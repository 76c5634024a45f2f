"""PostgreSQL sessions: connecting, sending a named statement, decoding its answer, and the meaning of errors.

A connection made here is used through libpq's ``pgconn`` alone, never through psycopg's own connection API. The
blocking session waits in ``poll`` and not in libpq, so Ctrl-C interrupts at once and every call ends in time;
``postgres_async`` has the one for asyncio. Host names are resolved within a time limit: libpq would wait for the
resolver without one.
"""

from __future__ import annotations

import json
import os
import select
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary, ref

from psycopg import OperationalError, ProgrammingError, pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo, timeout_from_conninfo
from psycopg.errors import error_from_result

from holdfast.database.call_queue import Again, Answer
from holdfast.database.engine import LOCKED
from holdfast.database.sessions import Calls, Row, session_class
from holdfast.database.statements import Statement, statements
from holdfast.database.url import Database
from holdfast.errors import EngineError, Refused, Unanswered, Unreachable
from holdfast.runtime import forks
from holdfast.runtime.clock import now
from holdfast.runtime.identity import application_name

_DECODE: dict[int, Callable[[bytes], Any]] = {
    16: b"t".__eq__, 20: int, 21: int, 23: int, 700: float, 701: float, 1700: float,
}  # fmt: skip

Columns = list[tuple[str, Callable[[bytes], Any]]]

# The statement did not run, and the session is over: a restart, a shutdown, a primary that was demoted.
_GONE = frozenset({"25006", "57P01", "57P02", "57P03", "57P05", "25P03"})
_PREPARED_UNSAFE = frozenset({"26000", "42P05"})
_READ_ONLY = "the primary refuses writes, because default_transaction_read_only is on"


def encode(value: Any) -> bytes | None:
    if value is None:
        return None
    if value is True or value is False:
        return b"t" if value else b"f"
    if isinstance(value, str):  # not str(value): that of an Enum member is its name
        return value.encode()
    return (json.dumps(value) if isinstance(value, dict | list) else str(value)).encode()


def columns(result: pq.abc.PGresult) -> Columns:
    """The columns of a result in text format: their names and decoders."""
    return [
        ((result.fname(column) or b"").decode(), _DECODE.get(result.ftype(column), bytes.decode))
        for column in range(result.nfields)
    ]


def decode_rows(result: pq.abc.PGresult, cached: Columns | None = None) -> list[Row]:
    """The rows of a result. ``cached``: its columns. hot: finding them takes longer than reading one row."""
    wanted, value = cached or columns(result), result.get_value
    return [
        {
            name: None if (raw := value(row, column)) is None else decode(raw)
            for column, (name, decode) in enumerate(wanted)
        }
        for row in range(result.ntuples)
    ]


class _OpeningConnection:
    """A connection that is being opened. A forked child drops it, too: when the parent dies, the server must see it."""

    def __init__(self, pgconn: pq.abc.PGconn) -> None:
        self._pgconn = ref(pgconn)

    def fileno(self) -> int | None:
        try:
            return None if (pgconn := self._pgconn()) is None else pgconn.socket
        except OperationalError:
            return None

    def abandon(self) -> None:
        """Nothing to do: only the parent uses it."""


_opening: WeakKeyDictionary[pq.abc.PGconn, _OpeningConnection] = WeakKeyDictionary()


class PostgresConnection:
    """One connection and its statements. Its two subclasses wait in different ways: in a thread, or on a loop.

    Several calls are sent as a pipeline with one Sync: one message, one transaction, one commit, one answer each. In
    it a statement waits for a row for 200 ms at most (``share``): a transaction that others are in must not wait for
    one of the user's. What would have to wait longer is refused, rolled back with its neighbours, and sent again alone.
    """

    def __init__(self, database: Database, pgconn: pq.abc.PGconn) -> None:
        self.database, self.pgconn = database, pgconn
        self.pooled = False
        self.version = 0
        self._statements = statements("postgres", database.schema)
        self._prepared: set[str] | None = set() if database.prepared else None
        self._columns: dict[str, Columns] = {}
        self._in_doubt = False
        self.shares = True
        self.identity: Row | None = None
        self.committed: list[Answer] | None = None
        pgconn.nonblocking = 1
        pgconn.notice_handler = self._notice
        forks.guard(self)
        _opening.pop(pgconn, None)

    def fileno(self) -> int | None:
        try:
            return self.pgconn.socket if self.pgconn.status == pq.ConnStatus.OK else None
        except OperationalError:
            return None

    def socket_options(self) -> Row | None:
        """The settings that decide how soon a lost server is noticed; None on a local socket."""
        with socket.socket(fileno=os.dup(self.pgconn.socket)) as ours:
            if ours.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            user_timeout = getattr(socket, "TCP_USER_TIMEOUT", None)  # Linux only
            return {
                "keepalive": bool(ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)),
                "user_timeout": None if user_timeout is None else ours.getsockopt(socket.IPPROTO_TCP, user_timeout),
            }

    def abandon(self) -> None:
        """In a forked child: the session is the parent's, and must not be closed here."""
        self.pgconn.notice_handler = None

    def close(self) -> None:
        self.pgconn.finish()

    def check_target(self) -> None:
        """Nothing to check: a server that goes away closes its connections."""

    def notifications(self) -> list[str]:
        """The payloads since the last call. Unanswered when the connection is lost."""
        payloads = []
        try:
            self.pgconn.consume_input()
            while (notify := self.pgconn.notifies()) is not None:
                payloads.append(notify.extra.decode())
        except OperationalError as error:
            raise Unanswered(f"the connection to {self.database} was lost") from error
        return payloads

    def _notice(self, result: pq.abc.PGresult) -> None:
        # "canceling wait for synchronous replication": the commit may be lost with this primary.
        if result.error_field(pq.DiagnosticField.SQLSTATE) == b"01000":
            self._in_doubt = True

    def _must_prepare(self, statement: Statement) -> bool:
        return self._prepared is not None and statement.name not in self._prepared

    def _send_prepare(self, statement: Statement) -> None:
        self.pgconn.send_prepare(statement.name.encode(), statement.sql.encode())

    def _send(self, statement: Statement, parameters: Mapping[str, Any]) -> None:
        self._in_doubt = False
        values = self._values(statement, parameters)
        if self._prepared is None:
            self.pgconn.send_query_params(statement.sql.encode(), values)
        else:
            self.pgconn.send_query_prepared(statement.name.encode(), values)

    def _values(self, statement: Statement, parameters: Mapping[str, Any]) -> list[bytes | None]:
        return [encode(parameters.get(key)) for key in statement.parameters]

    def _send_pipeline(self, statements: list[Statement], values: list[list[bytes | None]]) -> None:
        self._in_doubt = False
        pgconn = self.pgconn
        pgconn.enter_pipeline_mode()
        for statement, encoded in zip((self._statements["share"], *statements), ([], *values), strict=True):
            if self._prepared is None:
                pgconn.send_query_params(statement.sql.encode(), encoded)
            else:
                pgconn.send_query_prepared(statement.name.encode(), encoded)
        pgconn.pipeline_sync()

    def _pipeline_answers(self, names: list[str], results: list[pq.abc.PGresult]) -> list[Answer]:
        """The answers to a pipeline from all results up to that of its Sync, which is the commit. Unanswered when the
        commit is in doubt."""
        if self.pgconn.status != pq.ConnStatus.OK:
            raise Unanswered(f"the connection to {self.database} was lost")
        self.pgconn.exit_pipeline_mode()
        bad = next((i for i, result in enumerate(results) if result.status == pq.ExecStatus.FATAL_ERROR), None)
        if bad is None:
            return [self._rows(result, name) for name, result in zip(names, results[1:-1], strict=True)]
        error = self._as_error(results[bad])
        if isinstance(error, Unanswered):
            raise error
        if isinstance(error, Refused):
            self._unprepare(error)
        if 1 <= bad <= len(names):
            return [Again.ALONE if i == bad else Again.TOGETHER for i in range(1, len(names) + 1)]
        # The commit was refused. Each may be the reason, unless it waited too long for a lock, as for that of NOTIFY.
        is_late = isinstance(error, Refused) and error.sqlstate == LOCKED
        return [Again.TOGETHER if is_late else Again.ALONE] * len(names)

    def _rows(self, result: pq.abc.PGresult | None, name: str | None = None) -> list[Row]:
        """``name``: the statement, whose results always have the same columns."""
        if result is None or self.pgconn.status != pq.ConnStatus.OK:
            raise Unanswered(f"the connection to {self.database} was lost")
        if result.status not in (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK):
            raise self._as_error(result)
        if self._in_doubt:
            raise Unanswered(
                f"{self.database} answered without waiting for its synchronous standby: the commit may be lost"
            )
        if name is None or not result.ntuples:
            return decode_rows(result)
        if (cached := self._columns.get(name)) is None:
            cached = self._columns[name] = columns(result)
        return decode_rows(result, cached)

    def _as_error(self, result: pq.abc.PGresult) -> EngineError:
        state = (result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()
        message = (
            (result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or result.error_message)
            .decode("utf-8", "replace")
            .strip()
        )
        gone = state in _GONE or state.startswith("08")
        error = (
            Unanswered(f"{self.database} ended the session: {message}")
            if gone
            else Refused(f"{self.database}: {message}", state)
        )
        error.__cause__ = error_from_result(result)
        return error

    def _unprepare(self, error: Refused) -> bool:
        """Stop preparing statements if a pooler has lost them; whether that was the error."""
        if error.sqlstate not in _PREPARED_UNSAFE or self._prepared is None:
            return False
        self._prepared = None
        return True


class PostgresSession(PostgresConnection):
    def __init__(self, database: Database, pgconn: pq.abc.PGconn) -> None:
        super().__init__(database, pgconn)
        self._poll = select.poll()
        self._poll.register(pgconn.socket, select.POLLIN)

    @classmethod
    def open(cls, database: Database, timeout: float, *, for_examination: bool = False) -> PostgresSession:
        """``for_examination``: a standby will do, too, and no setting of the session is changed."""
        deadline = now() + timeout
        session = session_class(cls)(database, connect(database, timeout, for_examination=for_examination))
        try:
            session._set_up(deadline, for_examination)
        except BaseException:
            session.close()
            raise
        return session

    def _set_up(self, deadline: float, for_examination: bool) -> None:
        [facts] = self.call("session_open", {}, deadline - now())
        if (facts["in_recovery"] or facts["read_only"]) and not for_examination:
            problem = "it is a hot standby" if facts["in_recovery"] else _READ_ONLY
            raise Unreachable(f"cannot use {self.database}: {problem}. {_advice([problem])}")
        self.version = facts["version"]
        self.pooled = facts["pid"] != self.pgconn.backend_pid
        if self.pooled:  # its isolation level may be any, and settings do not stay
            self._prepared, self.shares = None, False
        elif not for_examination:
            [tuned] = self.call("session_tune", {}, deadline - now())
            self.identity = {key: tuned[key] for key in ("pid", "started", "server")}

    def call(self, name: str, parameters: Mapping[str, Any], timeout: float) -> list[Row]:
        """Run a named statement. If it is interrupted, its outcome is unknown and the session is closed."""
        deadline = now() + timeout
        statement = self._statements[name]
        try:
            if self._must_prepare(statement):
                self._send_prepare(statement)
                self._rows(self._answer(deadline))
                if self._prepared is not None:
                    self._prepared.add(name)
            self._send(statement, parameters)
            return self._rows(self._answer(deadline), name)
        except Refused as error:
            if not self._unprepare(error):
                raise
            return self.call(name, parameters, deadline - now())
        except OperationalError as error:
            self.close()
            raise Unanswered(f"the connection to {self.database} was lost") from error
        except BaseException:  # a timeout or Ctrl-C: the answer is half read
            self.close()
            raise

    def call_together(self, calls: Calls, timeout: float) -> list[Answer]:
        """Run named statements in one transaction. Unanswered when that of all of them is unknown."""
        deadline = now() + timeout
        names = [name for name, _ in calls]
        statements = [self._statements[name] for name in names]
        values: list[list[bytes | None]] = []
        for statement, (_, parameters) in zip(statements, calls, strict=True):
            try:
                values.append(self._values(statement, parameters))
            except Exception:  # a value that cannot be encoded: nothing was sent
                return [Again.ALONE if i == len(values) else Again.TOGETHER for i in range(len(calls))]
        try:
            for statement in (self._statements["share"], *statements):
                if self._must_prepare(statement):
                    self._send_prepare(statement)
                    self._rows(self._answer(deadline))
                    self._prepared.add(statement.name)  # type: ignore[union-attr]
            self._send_pipeline(statements, values)
            return self._pipeline_answers(names, self._results(deadline))
        except Refused:  # while it was prepared
            return [Again.ALONE] * len(calls)
        except OperationalError as error:
            self.close()
            raise Unanswered(f"the connection to {self.database} was lost") from error
        except BaseException:  # a timeout or Ctrl-C: the answers are half read
            self.close()
            raise

    def script(self, text: str, timeout: float) -> None:
        """Several statements in one message: one transaction, unless the text says otherwise."""
        self._in_doubt = False
        try:
            self.pgconn.send_query(text.encode())
            self._rows(self._answer(now() + timeout))
        except OperationalError as error:
            self.close()
            raise Unanswered(f"the connection to {self.database} was lost") from error

    def post(self, name: str, parameters: Mapping[str, Any], timeout: float) -> None:
        self.call("wait_long", {}, timeout)
        self._prepared = None
        self._send(self._statements[name], parameters)
        self._flush(now() + timeout)

    def answered(self) -> bool:
        try:
            self.pgconn.consume_input()
            return not self.pgconn.is_busy()
        except OperationalError:
            return True

    def show_waiting(self, names: Iterable[str]) -> None:
        """Through a pooler no lock stays in the session."""

    def hold(self, key: int, timeout: float) -> bool:
        return bool(self.call("session_hold", {"session_key": key}, timeout)[0]["done"])

    def hold_shared(self, key: int, timeout: float) -> bool:
        return bool(self.call("session_hold_shared", {"session_key": key}, timeout)[0]["done"])

    def _results(self, deadline: float) -> list[pq.abc.PGresult]:
        """All results of a pipeline, the last one of which is that of its Sync."""
        pgconn = self.pgconn
        results: list[pq.abc.PGresult] = []
        if pgconn.flush():
            self._flush(deadline)
        while not results or results[-1].status != pq.ExecStatus.PIPELINE_SYNC:
            while pgconn.is_busy():
                if not self._poll.poll(max(0.0, deadline - now()) * 1000):
                    raise Unanswered(f"{self.database} did not answer in time")
                pgconn.consume_input()
            if (result := pgconn.get_result()) is not None:
                results.append(result)
        return results

    def _answer(self, deadline: float) -> pq.abc.PGresult | None:
        pgconn = self.pgconn
        if pgconn.flush():
            self._flush(deadline)
        answer = None
        while True:
            while pgconn.is_busy():
                if not self._poll.poll(max(0.0, deadline - now()) * 1000):
                    raise Unanswered(f"{self.database} did not answer in time")
                pgconn.consume_input()
            result = pgconn.get_result()
            if result is None:
                return answer
            if answer is None or answer.status != pq.ExecStatus.FATAL_ERROR:
                answer = result

    def _flush(self, deadline: float) -> None:
        """Send what is buffered. Reads meanwhile: a server that waits for us to read its output would not read ours."""
        poll = select.poll()
        poll.register(self.pgconn.socket, select.POLLIN | select.POLLOUT)
        while self.pgconn.flush():
            if not poll.poll(max(0.0, deadline - now()) * 1000):
                raise Unanswered(f"{self.database} did not take our request in time")
            self.pgconn.consume_input()


def connect(database: Database, timeout: float, *, for_examination: bool = False) -> pq.abc.PGconn:
    """Connect to the first host that answers and is the primary. Unreachable if there is none.

    Each host gets its share of the time, at most connect_timeout (of the URL, or PGCONNECT_TIMEOUT).
    ``for_examination``: to the first host that answers, a standby too.
    """
    deadline = now() + timeout
    client = conninfo_to_dict(database.target).get("application_name") or os.environ.get("PGAPPNAME")
    target = make_conninfo(database.target, application_name=application_name(str(client or "")))
    if for_examination:
        target = make_conninfo(target, target_session_attrs="any")
    attempts = _attempts(target)
    problems: list[str] = []
    cause: Exception | None = None
    for number, conninfo in enumerate(attempts):
        share = (deadline - now()) / (len(attempts) - number)
        try:
            share = min(share, timeout_from_conninfo(conninfo_to_dict(conninfo)))
            return _connect_host(conninfo, now() + share)
        except (OperationalError, ProgrammingError, OSError) as error:
            cause = error
            message = " ".join(str(error).split())
            message = message.partition(" Is the server running")[0]  # libpq's advice: ours comes below
            if "session is read-only" in message and _is_primary(conninfo, now() + share):
                message = _READ_ONLY
            problems.append(message or (f"no answer within {share:.1f} s" if share >= 0.05 else "no answer in time"))
    raise Unreachable(f"cannot connect to {database}: {'; '.join(problems)}. {_advice(problems)}") from cause


def _is_primary(conninfo: str, deadline: float) -> bool:
    """Of a server that refused a session that writes. False if it does not answer."""
    try:
        pgconn = _connect_host(make_conninfo(conninfo, target_session_attrs="any"), deadline)
    except (OperationalError, OSError):
        return False
    try:
        return pgconn.parameter_status(b"in_hot_standby") == b"off"
    finally:
        pgconn.finish()


def _advice(problems: list[str]) -> str:
    text = " ".join(problems)
    if _READ_ONLY in text:
        return (
            "Find out where it is set (server, database or role) and why; then, for a role: "
            "ALTER ROLE … RESET default_transaction_read_only. Some providers set it when the disk is full."
        )
    if "too many c" in text or "connection slots" in text:
        return "All connections of the server are in use: use fewer, or raise its max_connections."
    if "password" in text or "authentication" in text or "role" in text:
        return "Check the user and the password in the URL, or PGPASSWORD, or ~/.pgpass."
    if "read-only" in text or "hot standby" in text or "recovery" in text:
        return "Leases need the primary: list every host of the cluster in the URL, and the primary is found."
    if "database" in text and "does not exist" in text:
        return "Create the database first, or correct its name in the URL."
    return "Is the server running, and are host and port right?"


def _attempts(conninfo: str) -> list[str]:
    parameters = conninfo_to_dict(conninfo)
    several = {
        key: str(parameters[key]).split(",") for key in ("host", "hostaddr", "port") if parameters.get(key) is not None
    }
    count = max((len(values) for values in several.values()), default=1)
    return [
        make_conninfo(conninfo, **{key: values[number if len(values) > 1 else 0] for key, values in several.items()})
        for number in range(count)
    ]


def _connect_host(conninfo: str, deadline: float) -> pq.abc.PGconn:
    """Each address of a host gets its share of the time, too: one of them may never answer."""
    parameters = conninfo_to_dict(conninfo)
    host = str(parameters.get("host") or "")
    if parameters.get("hostaddr") is not None or not is_name(host):
        return _connect_one(conninfo, deadline)
    candidates = addresses(host, str(parameters.get("port") or 5432), deadline)
    for number, address in enumerate(candidates):
        try:
            share = (deadline - now()) / (len(candidates) - number)
            return _connect_one(make_conninfo(conninfo, hostaddr=address), now() + share)
        except (OperationalError, TimeoutError):
            if address == candidates[-1]:
                raise
    raise OperationalError(f"the name {host!r} has no address")


def _connect_one(conninfo: str, deadline: float) -> pq.abc.PGconn:
    with forks.opening:  # no fork between opening the socket and registering it
        pgconn = pq.PGconn.connect_start(conninfo.encode())
        _opening[pgconn] = opening = _OpeningConnection(pgconn)
        forks.guard(opening)
    try:
        wanted = select.POLLOUT
        while True:
            if pgconn.status == pq.ConnStatus.BAD:
                raise OperationalError(pgconn.get_error_message())
            poll = select.poll()
            poll.register(pgconn.socket, wanted)
            if not poll.poll(max(0.0, deadline - now()) * 1000):
                raise TimeoutError
            status = pgconn.connect_poll()
            if status == pq.PollingStatus.OK:
                return pgconn
            if status == pq.PollingStatus.FAILED:
                raise OperationalError(pgconn.get_error_message())
            wanted = select.POLLIN if status == pq.PollingStatus.READING else select.POLLOUT
    except BaseException:
        pgconn.finish()
        raise


def addresses(host: str, port: str, deadline: float) -> list[str]:
    """Every address of ``host``, in the resolver's order. OSError when it has none, or none in time.

    The resolver runs in a thread, which cannot be stopped: it is left behind when it is late.
    """
    answer: list[list[str] | OSError] = []

    def resolve() -> None:
        try:
            entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            answer.append(list(dict.fromkeys(str(address[0]) for *_, address in entries)))
        except OSError as error:
            answer.append(error)

    thread = threading.Thread(target=resolve, name="holdfast-resolver", daemon=True)
    thread.start()
    thread.join(max(0.0, deadline - now()))
    if not answer:
        raise TimeoutError(f"the name {host!r} could not be resolved in time")
    if isinstance(answer[0], OSError):
        raise OSError(f"the name {host!r} could not be resolved: {answer[0].strerror or answer[0]}")
    return answer[0]


def is_name(host: str) -> bool:
    """Whether it needs a resolver: the folder of a socket and an address do not."""
    if not host or host[0] in "/@":
        return False
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
            return False
        except OSError:
            continue
    return True
