"""Holds the line of how we write: modules are nouns, variables are things, sentences have a subject."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "holdfast"
BESIDE = ("bench", "deploy", "examples", "proof", "scripts", "spec")
"""Folders beside the package whose comments and messages are checked as well."""
TEXTS = frozenset({".cron", ".json", ".md", ".pml", ".py", ".service", ".sh", ".sql", ".yaml", ".yml"})
"""Endings of the files whose sentences are checked, beside the Dockerfile."""
METAPHORS = frozenset(
    "ears heart books crew door desk yard pulse bell house arena nursery looks scenes".split()  # noqa: SIM905
)
GERUNDS = frozenset({"formatting", "testing"})
"""Modules that may end in -ing: the field's own words for the package for tests, and for the formatting of values."""
PUBLIC = frozenset({"Event"})
"""A class name that two public modules have: ``holdfast.lineage.Event`` and ``holdfast.testing.Event``."""
UNIX_USER = "testing/server_user.py"
"""Has a user of that name."""
EMPTY = frozenset({"told", "found", "said", "known", "made"})
"""Participles that say nothing of what a variable holds."""
ANYBODY = re.compile(r"\b(whoever|somebody|nobody)\b", re.IGNORECASE)


@cache
def sources() -> dict[str, str]:
    """Every module that is written by hand, by its path."""
    texts = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    return {name: text for name, text in sorted(texts.items()) if not text.startswith("# Generated from")}


@cache
def sentences() -> dict[str, str]:
    """The modules, the SQL files, and every file beside the package, by path. Not yet ``sqlite.sql`` of a noun."""
    sql = (path for path in PACKAGE.rglob("*.sql") if path.name != "sqlite.sql")
    texts = {path.relative_to(PACKAGE).as_posix(): path for path in sql}
    for path in (path for folder in BESIDE for path in (ROOT / folder).rglob("*")):
        if path.suffix in TEXTS or path.name == "Dockerfile":
            texts[path.relative_to(ROOT).as_posix()] = path
    return sources() | {name: path.read_text(encoding="utf-8") for name, path in sorted(texts.items())}


def test_modules_are_named_by_the_noun_they_define() -> None:
    stems = {name: Path(name).stem.removesuffix("_async") for name in sources()}
    folders = {part for name in sources() for part in Path(name).parts[:-1]}
    assert not [name for name, stem in stems.items() if stem.endswith("ing") and stem not in GERUNDS]
    assert not [folder for folder in folders if folder.endswith("ing") and folder not in GERUNDS]
    assert not [name for name, stem in stems.items() if stem in METAPHORS]


def test_variables_are_named_by_what_they_hold() -> None:
    empty = []
    for name, text in sources().items():
        tree = ast.parse(text)
        fields = {id(part.target) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for part in node.body
                  if isinstance(part, ast.AnnAssign)}  # fmt: skip
        for node in ast.walk(tree):
            stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in EMPTY
            given = isinstance(node, ast.arg) and node.arg in EMPTY
            if (stored and id(node) not in fields) or given:
                empty.append(f"{name}:{getattr(node, 'lineno', 0)}")
    assert not empty


def test_sentences_have_a_subject() -> None:
    assert {Path(name).suffix for name in sentences()} >= {".py", ".sql", ".pml", ".sh", ".yml"}
    vague = [
        f"{name}:{number}"
        for name, text in sentences().items()
        if name != UNIX_USER
        for number, line in enumerate(text.splitlines(), 1)
        if ANYBODY.search(line)
    ]
    assert not vague


def test_a_class_name_occurs_once() -> None:
    names: Counter[str] = Counter()
    for text in sources().values():
        names.update(node.name for node in ast.parse(text).body if isinstance(node, ast.ClassDef))
    assert not [name for name, count in names.items() if count > 1 and name not in PUBLIC]
