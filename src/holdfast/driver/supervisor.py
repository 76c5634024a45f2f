"""The process beside every sandbox: starts it once, keeps its log within bounds, ends it, and writes down how it ended.

It outlives the driver. Run as a file of its own (`python -I -S supervisor.py FOLDER RUN`) on the standard library
alone, because there is one for each sandbox and it has to be small. The folder is all it shares with the driver:

    spec.json     what to run; written by the driver before the folder gets its name
    lock          locked by the supervisor for as long as it lives: the kernel's word, no pid can be mistaken for it
    orders        a FIFO from the driver: `end SECONDS`
    life          a FIFO to the driver: a byte when a file has changed, and its end when the supervisor is gone
    deleting      there from the moment that somebody asked for the sandbox to be deleted
    started.json  there before the program runs: whoever finds it never runs the program again
    running       there when it runs: the folder could be entered, the program found
    exit.json     there when nothing of the sandbox runs any more
    log.OFFSET    what it wrote, in pieces; the oldest go when there is too much

Everything the program starts is a descendant, and no descendant can leave: its supervisor is where the kernel puts
orphans (PR_SET_CHILD_SUBREAPER). A child that is not yet waited for keeps its pid, so that no signal of ours can hit
anybody else.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import select
import signal
import struct
import sys
import time
from _ctypes import call_function, dlopen, dlsym  # ctypes above it is slow to import
from typing import Any, NoReturn

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38
NOT_FOUND, NOT_EXECUTABLE = 127, 126
TICK = 0.02
LOCK = "hhqqi4x"
LIMITS = {
    "memory_bytes": resource.RLIMIT_AS,
    "cpu_seconds": resource.RLIMIT_CPU,
    "open_files": resource.RLIMIT_NOFILE,
    "processes": resource.RLIMIT_NPROC,
}


def prctl(option: int, value: int) -> None:
    call_function(dlsym(dlopen("", 0), "prctl"), (option, value, 0, 0, 0))


def write(name: str, value: dict[str, Any]) -> None:
    """Whole or not at all, and on the disk when it returns."""
    with open(f"{name}.new", "w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{name}.new", name)
    folder = os.open(".", os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def locked(attempts: int = 100) -> int | None:
    """The descriptor that holds the lock; None when another supervisor has it."""
    descriptor = os.open("lock", os.O_RDWR | os.O_CLOEXEC)
    for _ in range(attempts):  # the driver takes it for a moment when it looks whether we are gone
        try:
            fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack(LOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
            return descriptor
        except (BlockingIOError, PermissionError):
            time.sleep(TICK)
    return None


class Log:
    """Two pieces at most, each named by the offset of its first byte and half as large as all may be."""

    def __init__(self, most: int) -> None:
        self._most, self.end, self.dropped = max(most // 2, 1), 0, 0
        self._pieces: list[int] = []
        self._file = -1

    def add(self, data: bytes) -> None:
        while data:
            if not self._pieces or self.end - self._pieces[-1] >= self._most:
                self._turn()
            room = self._most - (self.end - self._pieces[-1])
            part, data = data[:room], data[room:]
            try:
                written = os.write(self._file, part)
            except OSError:  # the disk is full: the program goes on, and what it says is lost
                self.dropped += len(part)
                continue
            self.end += written
            data = part[written:] + data

    def _turn(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._pieces.append(self.end)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        try:
            self._file = os.open(f"log.{self.end}", flags, 0o600)
        except OSError:
            self._file = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        while len(self._pieces) > 2:
            try:
                os.unlink(f"log.{self._pieces.pop(0)}")
            except OSError:  # somebody has been here before
                pass


class Supervisor:
    def __init__(self, spec: dict[str, Any], run: str, life: int) -> None:
        self._spec, self._run, self._life = spec, run, life
        self._orders = os.open("orders", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._log = Log(spec["log_bytes"])
        self._bell, bell = os.pipe()
        os.set_blocking(self._bell, False)
        os.set_blocking(bell, False)
        signal.set_wakeup_fd(bell, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)
        self._pid, self._alone = 0, False
        self._status: int | None = None
        self._problem: str | None = None
        self._kill_at: float | None = None
        self._output = -1

    def run(self) -> None:
        self._start()
        poll = select.poll()
        for descriptor in (self._bell, self._orders, self._output):
            poll.register(descriptor, select.POLLIN)
        while not self._alone:
            wait = None if self._kill_at is None else max(0.0, self._kill_at - time.monotonic()) * 1000
            if self._status is not None or wait == 0:
                wait = TICK * 1000
            for descriptor, _ in poll.poll(wait):
                if descriptor == self._output and not self._pump():
                    poll.unregister(descriptor)
                elif descriptor == self._bell and signal.SIGTERM in os.read(self._bell, 4096):
                    self._end(self._spec["grace"])
                elif descriptor == self._orders:
                    self._obey(os.read(self._orders, 4096))
            self._bury()
            if self._status is not None or (self._kill_at is not None and time.monotonic() >= self._kill_at):
                self._kill()
        while self._pump():
            pass
        self._finish()

    def _start(self) -> None:
        """The program waits for a word before it runs, and the word comes after `started.json`."""
        self._output, output = os.pipe()
        go, word = os.pipe()
        failure, tell = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            become(self._spec, self._run, output, go, tell, (word, failure, self._output))
        for descriptor in (output, go, tell):
            os.close(descriptor)
        os.set_blocking(self._output, False)
        write("started.json", {"pid": self._pid, "supervisor": os.getpid(), "started_at": time.time()})
        os.write(word, b"go")
        os.close(word)
        said = os.read(failure, 1000)
        os.close(failure)
        if said:
            self._problem = said.decode("utf-8", "replace")
        else:
            os.close(os.open("running", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self._ring()

    def _ring(self) -> None:
        try:
            os.write(self._life, b".")
        except BlockingIOError:  # nobody has read for a long time; the driver will look at the files when it comes
            pass

    def _pump(self) -> bool:
        """Whether there may be more."""
        try:
            data = os.read(self._output, 65536)
        except BlockingIOError:
            return not self._alone
        self._log.add(data)
        return bool(data)

    def _obey(self, orders: bytes) -> None:
        for order in orders.decode("ascii", "replace").splitlines():
            word, _, seconds = order.partition(" ")
            if word == "end":
                self._end(float(seconds))

    def _end(self, grace: float) -> None:
        """TERM, also to what is stopped, and KILL after the grace. Asked again, the earlier end counts."""
        by = time.monotonic() + grace
        self._kill_at = by if self._kill_at is None else min(self._kill_at, by)
        if grace > 0:
            self._tell(signal.SIGTERM)
            self._tell(signal.SIGCONT)

    def _tell(self, number: int) -> None:
        """The group, as long as its leader is not buried: until then the number is its own."""
        if self._status is None:
            try:
                os.killpg(self._pid, number)
            except (ProcessLookupError, PermissionError):
                pass

    def _bury(self) -> None:
        """What has ended. The program's own end takes with it whatever it left behind, as in a container."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                self._alone = True
                return
            if ended is None:
                return
            if ended.si_pid == self._pid:
                self._tell(signal.SIGKILL)
            _, status = os.waitpid(ended.si_pid, 0)
            if ended.si_pid == self._pid:
                self._status = status

    def _kill(self) -> None:
        """All children, again and again: theirs become ours."""
        self._tell(signal.SIGKILL)
        for child in children():
            try:
                os.kill(child, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass

    def _finish(self) -> None:
        """Whatever the disk says, until it is written: this is the only place where it is known."""
        code = os.waitstatus_to_exitcode(self._status or 0)
        end = {
            "exit_code": code if code >= 0 else None,
            "signal": -code if code < 0 else None,
            "problem": self._problem,
            "ended": self._kill_at is not None,
            "finished_at": time.time(),
            "log_dropped": self._log.dropped,
        }
        while True:
            try:
                return write("exit.json", end)
            except FileNotFoundError:
                raise
            except OSError:
                time.sleep(1.0)


def children() -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parent = int(file.read().rpartition(b") ")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
            if parent == os.getpid():
                found.append(int(name))
    return found


def become(spec: dict[str, Any], run: str, output: int, go: int, tell: int, others: tuple[int, ...]) -> NoReturn:
    """In the child: be the sandbox's program, or say why not."""
    code, message = NOT_EXECUTABLE, "it cannot be started"
    try:
        for descriptor in others:
            os.close(descriptor)
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        for number in range(1, signal.NSIG):
            if number not in (signal.SIGKILL, signal.SIGSTOP) and signal.getsignal(number) is not None:
                signal.signal(number, signal.SIG_DFL)
        if not os.read(go, 1):  # the supervisor died in between, and nothing is to run
            os._exit(NOT_EXECUTABLE)
        message = f"its folder {spec['cwd']!r} cannot be entered"
        os.chdir(spec["cwd"] or "work")
        os.umask(0o022)
        message = "its limits cannot be set"
        limit(spec["limits"])
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        message = f"{spec['argv'][0]!r} cannot be run"
        os.execvpe(spec["argv"][0], spec["argv"], environment(spec, run))
    except BaseException as error:
        missing = isinstance(error, OSError) and error.errno == errno.ENOENT and message.endswith("run")
        code = NOT_FOUND if missing else NOT_EXECUTABLE
        why = error.strerror if isinstance(error, OSError) else str(error)
        os.write(tell, f"{message}: {why}".encode("utf-8", "replace")[:1000])
    finally:
        os._exit(code)


def limit(limits: dict[str, int]) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for name, most in limits.items():
        _, hard = resource.getrlimit(LIMITS[name])
        at, by = most, most + (name == "cpu_seconds")  # XCPU, and KILL a second later
        if hard != resource.RLIM_INFINITY:
            at, by = min(at, hard), min(by, hard)
        resource.setrlimit(LIMITS[name], (at, by))


def environment(spec: dict[str, Any], run: str) -> dict[str, str]:
    """Nothing of the driver's own but what programs need to find their way: it may have secrets there."""
    own = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR") if name in os.environ}
    return {**own, **spec["env"], "HOLDFAST_SANDBOX": spec["id"], "HOLDFAST_SANDBOX_RUN": run}


def main(folder: str, run: str, open_files: str | None = None) -> int:
    os.chdir(folder)
    os.umask(0o077)
    if open_files is not None:  # the driver has made room for itself
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(open_files), hard))
    life = os.open("life", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)  # before the lock: see Box.watch
    lock = locked()
    if lock is None or any(map(os.path.exists, ("deleting", "started.json", "exit.json"))):
        return 0
    with open("spec.json", encoding="utf-8") as file:
        spec = json.load(file)
    if spec["run"] != run:  # another sandbox has the name by now
        return 0
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    Supervisor(spec, run, life).run()
    return 0


if __name__ == "__main__":
    try:
        code = main(*sys.argv[1:])
    except FileNotFoundError:  # deleted before we came
        code = 0
    sys.exit(code)
