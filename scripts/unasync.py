"""Writes `x.py` beside every `x_async.py` in src/holdfast; with --check, compares the two and writes nothing.

Works on tokens, so the layout of the source survives until ruff formats the result. Strings and comments are converted
as text: names are renamed, and `async with`, `async for`, `async def` and `await call(...)` lose their keyword, so that
examples in docstrings are correct in both flavours. Overloads for a coroutine function and for a plain one are the same
without `await`, and become one signature.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "holdfast"
HAND_WRITTEN = {
    "database/call_dispatcher_async.py",
    "database/postgres_async.py",
    "database/sqlite_async.py",
    "driver/dial_async.py",
    "lock/executor_async.py",
    "runtime/concurrency_async.py",
}
"""Pairs that differ in more than keywords: the same names, both written by hand."""
ATTRIBUTES = ROOT / ".gitattributes"
MARK = "linguist-generated=true"
HEADER = "# Generated from {} by scripts/unasync.py. Do not edit.\n"

NAMES = {
    "AbstractAsyncContextManager": "AbstractContextManager",
    "StopAsyncIteration": "StopIteration",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
    "aclose": "close",
    "aiter": "iter",
    "anext": "next",
    "async_scoped_session": "scoped_session",
    "asynccontextmanager": "contextmanager",
    "enter_async_context": "enter_context",
    "push_async_callback": "callback",
    "push_async_exit": "push",
}
# The index of the argument of `Name[...]` that replaces it.
UNWRAPPED = {"Awaitable": 0, "Coroutine": 2}
# What ruff may fix in the output: import order, unused imports, `X | X`, `((x))`.
MENDED = "I,F401,PYI016,UP034"

Edit = tuple[int, int, str]
Token = tuple[str, int, int]


def rename(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    return re.sub(r"^(_*)Async(?=[A-Z])", r"\1", name).removesuffix("_async")


def convert_text(text: str) -> str:
    """Converts the parts of a string or a comment that look like code."""
    text = re.sub(r"\basync (?=(?:with|for|def)\b)", "", text)
    text = re.sub(r"\bawait (?=[\w.]+[(\[])", "", text)
    text = re.sub(r"\b([Aa])n (`*)(?=Async[B-DF-HJ-NP-TV-Z])", r"\1 \2", text)
    return re.sub(r"[A-Za-z_]\w*", lambda match: rename(match[0]), text)


def tokens_of(source: str) -> list[Token]:
    """The tokens that are not white space. An f-string is one token, even since Python 3.12."""
    lines = [0]
    for line in io.StringIO(source):
        lines.append(lines[-1] + len(line))
    tokens: list[Token] = []
    opened: list[int] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        start, end = (lines[row - 1] + column for row, column in (token.start, token.end))
        kind = tokenize.tok_name[token.type]
        if kind.endswith("STRING_START"):
            opened.append(start)
        elif kind.endswith("STRING_END"):
            start = opened.pop()
        if not opened and source[start:end].strip():
            tokens.append((source[start:end], start, end))
    return tokens


def unwrap(source: str, tokens: list[Token], at: int) -> Iterator[Edit]:
    """Replaces `Name[a, b, c]`, whose name is tokens[at], by one of its arguments."""
    depth, commas = 1, []
    close = at + 2
    while True:
        text = tokens[close][0]
        depth += (text in {"(", "[", "{"}) - (text in {")", "]", "}"})
        if depth == 0:
            break
        if text == "," and depth == 1:
            commas.append(close)
        close += 1
    keep = UNWRAPPED[tokens[at][0]]
    first = commas[keep - 1] + 1 if keep else at + 2
    last = commas[keep] if len(commas) > keep else close
    spans_lines = "\n" in source[tokens[at][1] : tokens[close][2]]
    yield tokens[at][1], tokens[first][1], "(" * spans_lines
    yield tokens[last][1], tokens[close][2], ")" * spans_lines


def edits_of(source: str) -> Iterator[Edit]:
    tokens = tokens_of(source)
    for index, (text, start, end) in enumerate(tokens):
        following, following_start, _ = tokens[index + 1] if index + 1 < len(tokens) else ("", end, end)
        if text == "__await__":
            raise ValueError("__await__ has no sync counterpart: write both files by hand, and name it in HAND_WRITTEN")
        if text == "await" or (text == "async" and following in {"def", "with", "for"}):
            yield start, following_start, ""
        elif text in UNWRAPPED and following == "[":
            yield from unwrap(source, tokens, index)
        elif text.isidentifier():
            yield start, end, rename(text)
        elif text[0] == "#" or text[-1] in "\"'":
            yield start, end, convert_text(text)


def convert(source: str) -> str:
    parts, done = [], 0
    for start, end, text in sorted(edits_of(source)):
        if start >= done:  # otherwise the edit is inside a removed span
            parts += [source[done:start], text]
            done = end
    return drop_repeated_overloads("".join([*parts, source[done:]]))


def drop_repeated_overloads(code: str) -> str:
    """Drops each overload that is the same as one before it. If one is left, it is dropped, too: the implementation has
    its signature."""
    dropped = set[int]()
    for scope in ast.walk(ast.parse(code)):
        if not isinstance(scope, ast.Module | ast.ClassDef):
            continue
        overloads: dict[str, dict[str, list[ast.FunctionDef]]] = {}
        for node in scope.body:
            if isinstance(node, ast.FunctionDef) and "overload" in map(ast.unparse, node.decorator_list):
                signature = f"{ast.dump(node.args)} {ast.dump(node.returns or ast.Constant(None))}"
                overloads.setdefault(node.name, {}).setdefault(signature, []).append(node)
        for signatures in overloads.values():
            first = 0 if len(signatures) == 1 else 1
            for node in [node for nodes in signatures.values() for node in nodes[first:]]:
                dropped.update(range(node.decorator_list[0].lineno, (node.end_lineno or node.lineno) + 1))
    return "".join(line for number, line in enumerate(io.StringIO(code), 1) if number not in dropped)


def ruff(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "ruff", *arguments, "--quiet", "--no-cache", "--config", ROOT / "pyproject.toml"]
    if subprocess.run(command, check=False).returncode:
        raise SystemExit("unasync: ruff refused the generated code, see above")


def generate(folder: Path) -> dict[Path, str]:
    """The contents of every generated file, by its path in the package; `folder` is scratch space."""
    if missing := [name for name in sorted(HAND_WRITTEN) if not (PACKAGE / name).exists()]:
        raise SystemExit(f"unasync: HAND_WRITTEN names files that do not exist: {', '.join(missing)}")
    present = read(PACKAGE)
    for path in sorted(PACKAGE.rglob("*_async.py")):
        name = path.relative_to(PACKAGE)
        if name.as_posix() in HAND_WRITTEN:
            continue
        try:
            code = convert(path.read_text(encoding="utf-8"))
        except (ValueError, SyntaxError, tokenize.TokenError) as error:
            raise SystemExit(f"unasync: {path.relative_to(ROOT)}: {error}") from error
        target = name.with_name(f"{rename(path.stem)}.py")
        if (PACKAGE / target).exists() and target not in present:
            raise SystemExit(f"unasync: src/holdfast/{target} is written by hand: add {name} to HAND_WRITTEN")
        copy = folder / target
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(HEADER.format(path.name) + code, encoding="utf-8")
    ruff("check", "--fix", "--exit-zero", "--select", MENDED, folder)
    ruff("format", folder)
    return read(folder)


def read(folder: Path) -> dict[Path, str]:
    """The generated files below a folder, recognized by their first line."""
    files = {path.relative_to(folder): path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))}
    return {path: text for path, text in files.items() if text.startswith(HEADER.partition("{")[0])}


def attributes(generated: Iterable[Path]) -> str:
    """The text of .gitattributes: its lines about other files, then one line per generated file."""
    lines = ATTRIBUTES.read_text(encoding="utf-8").splitlines()
    others = [line for line in lines if not (line.startswith("src/") and line.endswith(MARK))]
    return "\n".join([*others, *(f"src/holdfast/{path.as_posix()} {MARK}" for path in sorted(generated)), ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="only compare; exit 1 if a file differs")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as scratch:
        wanted = generate(Path(scratch))
    present = read(PACKAGE)
    differing = sorted(name for name in wanted.keys() | present.keys() if wanted.get(name) != present.get(name))
    for name in differing:
        path = PACKAGE / name
        state = "stale" if name not in wanted else "missing" if name not in present else "differs"
        if check:
            print(f"{path.relative_to(ROOT)}: {state}")
        elif name in wanted:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted[name], encoding="utf-8")
        else:
            path.unlink()
    marked = attributes(wanted)
    if not check:
        ATTRIBUTES.write_text(marked, encoding="utf-8")
        return 0
    if marked != ATTRIBUTES.read_text(encoding="utf-8"):
        print(f"{ATTRIBUTES.relative_to(ROOT)}: differs")
        differing.append(ATTRIBUTES)
    if differing:
        print("the sync files differ from what the async files generate; run: .venv/bin/python scripts/unasync.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
