#!/bin/sh
# Creates the virtual environment $1 (default .venv) and installs the requirements locked in $2 and this project into it.
# Uses uv if it is on PATH, else venv and pip. $PYTHON names the interpreter; the default is the first suitable one.
set -eu
cd "$(dirname "$0")/.."
venv=${1:-.venv}
lock=${2:-requirements-dev.lock}

say() { printf '%s\n' "setup: $*"; }
fail() { printf '%s\n' "setup: error: $*" >&2; exit 1; }

# Runs the candidate: PATH may have a shim for a version that is not installed.
new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }
can_make_venv() { "$1" -c 'import ensurepip, venv' >/dev/null 2>&1; }

pick_python() {
    if [ -n "${PYTHON:-}" ]; then set -- "$PYTHON"; else set -- python3.13 python3.12 python3.11 python3; fi
    suitable=""
    for candidate; do
        new_enough "$candidate" || continue
        suitable=$candidate
        if $with_uv || can_make_venv "$candidate"; then
            python=$("$candidate" -c 'import sys; print(sys.executable)')
            return
        fi
    done
    [ -z "$suitable" ] ||
        fail "$suitable has no ensurepip, so it cannot make virtual environments." \
            "Install it (Debian, Ubuntu: apt install python3-venv), put uv on PATH, or name another with PYTHON=..."
    [ -z "${PYTHON:-}" ] || fail "PYTHON=$PYTHON does not run, or is older than Python 3.11."
    fail "Python 3.11 or newer is needed; python3 here is: $(python3 --version 2>&1 | head -n 1)." \
        "Name another with PYTHON=/path/to/python3."
}

# Whether the environment can be reused: it runs, was created in this folder (its scripts contain the path), and with $PYTHON.
usable() {
    [ "$(cat "$venv/.home" 2>/dev/null)" = "$(pwd -P)" ] || return 1
    new_enough "$venv/bin/python" || return 1
    [ -z "${PYTHON:-}" ] || [ "$(version_of "$PYTHON")" = "$(version_of "$venv/bin/python")" ] || return 1
    $with_uv || "$venv/bin/python" -m pip --version >/dev/null 2>&1
}
version_of() { "$1" -c 'import sys; print(sys.version)' 2>/dev/null || echo none; }

make_venv() {
    usable && return
    pick_python
    say "making $venv with $("$python" --version)"
    rm -rf "$venv"
    if $with_uv; then
        uv venv --quiet --python "$python" "$venv" || return 1
    else
        "$python" -m venv "$venv" || { rm -rf "$venv"; fail "$python -m venv failed, see above."; }
    fi
    pwd -P >"$venv/.home"
}

# Two steps each: --require-hashes cannot install from a folder.
install_with_uv() {
    # An account without a writable home has no place for the cache.
    cache=$(uv cache dir) && mkdir -p "$cache" 2>/dev/null && [ -w "$cache" ] || export UV_NO_CACHE=1
    say "installing $count locked packages with uv"
    uv pip sync --quiet --python "$venv/bin/python" --require-hashes "$lock" &&
        uv pip install --quiet --python "$venv/bin/python" --no-deps --no-build-isolation --editable .
}

# The lock file in two halves, concurrently: pip mostly unpacks, on one core. The lock file is complete, so nothing has to be
# resolved.
install_with_pip() {
    say "installing $count locked packages with pip (the first time takes up to half a minute)"
    awk -v file="$venv/.half" '/^[a-z]/ { n++ } { print >(file n % 2) }' "$lock"
    pip_install --require-hashes --requirement "$venv/.half0" &
    other=$!
    pip_install --require-hashes --requirement "$venv/.half1" || { wait "$other"; return 1; }
    wait "$other"
    pip_install --no-build-isolation --editable .
}
# Most modules are never imported; the others are compiled on first import.
pip_install() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile --no-deps "$@"; }

count=$(grep -c '^[a-z]' "$lock")
with_uv=false
if uv --version >/dev/null 2>&1; then
    with_uv=true
    # pip may have an index, a proxy or certificates in its configuration that uv lacks.
    { make_venv && install_with_uv; } || { say "uv failed, see above; trying pip" && with_uv=false; }
fi
if ! $with_uv; then
    make_venv
    install_with_pip
fi
say "done"
