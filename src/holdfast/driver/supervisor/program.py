"""The child process that executes the program: its session, limits and environment, and the reason of a failure."""

from __future__ import annotations

import errno
import os
import resource
import signal

# private: _ctypes.call_function, dlopen, dlsym, tested in tests/test_private_names.py (ctypes is slow to import)
from _ctypes import call_function, dlopen, dlsym
from typing import Any, NoReturn

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38
NOT_FOUND, NOT_EXECUTABLE = 127, 126
LIMITS = {
    "memory_bytes": resource.RLIMIT_AS,
    "cpu_seconds": resource.RLIMIT_CPU,
    "open_files": resource.RLIMIT_NOFILE,
    "processes": resource.RLIMIT_NPROC,
}


def prctl(option: int, value: int) -> None:
    call_function(dlsym(dlopen("", 0), "prctl"), (option, value, 0, 0, 0))


def execute(spec: dict[str, Any], run: str, output: int, go: int, failure: int, others: tuple[int, ...]) -> NoReturn:
    """In the child: wait for a byte from ``go``, then execute the program, or write the reason to ``failure``."""
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
        if not os.read(go, 1):  # the supervisor has died: nothing may run
            os._exit(NOT_EXECUTABLE)
        message = f"its folder {spec['cwd']!r} cannot be entered"
        os.chdir(spec["cwd"] or os.path.join("..", "..", "work", spec["id"]))
        os.umask(0o022)
        message = "its limits cannot be set"
        limit(spec["limits"])
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        message = f"{spec['argv'][0]!r} cannot be run"
        os.execvpe(spec["argv"][0], spec["argv"], environment(spec, run))
    except BaseException as error:
        is_missing = message.endswith("run") and is_not_found(error, spec["argv"][0], environment(spec, run))
        code = NOT_FOUND if is_missing else NOT_EXECUTABLE
        reason = os.strerror(errno.ENOENT) if is_missing else getattr(error, "strerror", None) or str(error)
        os.write(failure, f"{message}: {reason}".encode("utf-8", "replace")[:1000])
    finally:
        os._exit(code)


def is_not_found(error: BaseException, program: str, variables: dict[str, str]) -> bool:
    """Whether no folder of PATH has the program; a folder that may not be entered answers "permission denied"."""
    import shutil

    if isinstance(error, PermissionError) and "/" not in program:
        return shutil.which(program, os.F_OK, variables.get("PATH")) is None
    return isinstance(error, FileNotFoundError)


def limit(limits: dict[str, int]) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for name, limit in limits.items():
        _, hard = resource.getrlimit(LIMITS[name])
        at, by = limit, limit + (name == "cpu_seconds")  # XCPU, and KILL a second later
        if hard != resource.RLIM_INFINITY:
            at, by = min(at, hard), min(by, hard)
        resource.setrlimit(LIMITS[name], (at, by))


def environment(spec: dict[str, Any], run: str) -> dict[str, str]:
    """The variables of the spec, and a few of the driver's own; the others may be secrets."""
    own = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR") if name in os.environ}
    return {**own, **spec["env"], "HOLDFAST_SANDBOX": spec["id"], "HOLDFAST_SANDBOX_RUN": run}
