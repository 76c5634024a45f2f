"""The modules that decide are pure: no I/O, no clock, no threads, and nothing of ours that is not pure itself."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "holdfast"
PURE = """
    canonical errors extras geo keys lazy_names names problem_json reconciler timestamps
    database/privileges
    doctor/findings doctor/operations doctor/postgres doctor/sqlite
    driver/driver_json
    governance/audit_record governance/dataset governance/policy governance/policy_record
    lease/loss lease/probe lease/records lease/terms lease/trust
    lineage/descriptions lineage/records lineage/relay_terms lineage/verification
    lock/pool lock/records lock/row_key lock/terms
    objects/changes objects/model
    operations/archive operations/batch_terms operations/decide operations/energy operations/events
    operations/lineage_terms operations/log operations/outcome operations/result_codec operations/review_record
    operations/terms
    recipes/elector_terms recipes/gate_terms recipes/guard_terms recipes/reconciler_rules
    recipes/reconciler_terms recipes/shards_terms recipes/slots_terms
    runtime/metrics
    schedules/records schedules/terms schedules/timetable
""".split()  # noqa: SIM905
FORBIDDEN = {
    "asyncio", "asyncpg", "concurrent", "multiprocessing", "psycopg", "queue", "select", "selectors", "signal",
    "socket", "sqlalchemy", "sqlite3", "ssl", "subprocess", "threading", "time",
}  # fmt: skip


class RunTime(ast.NodeTransformer):
    """Removes what only type checkers read."""

    def visit_If(self, node: ast.If) -> ast.AST | None:
        is_for_checkers = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        return None if is_for_checkers else self.generic_visit(node)


def imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(RunTime().visit(ast.parse(path.read_text(encoding="utf-8")))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("name", PURE)
def test_a_module_that_decides_imports_nothing_that_acts(name: str) -> None:
    used = imports(PACKAGE / f"{name}.py")
    assert not {module for module in used if module.split(".")[0] in FORBIDDEN}
    pure = {f"holdfast.{module.replace('/', '.').removesuffix('.__init__')}" for module in PURE}
    own = {module for module in used if module.split(".")[0] == "holdfast"}
    assert not {module for module in own if module not in pure and module.rpartition(".")[0] not in pure}


def test_neither_flavour_imports_the_other() -> None:
    """A file that is generated imports no ``x_async``, and its source nothing that is generated."""
    texts = {path: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    generated = {path for path, text in texts.items() if text.startswith("# Generated from")}
    assert len(generated) > 40
    names = {f"holdfast.{path.relative_to(PACKAGE).with_suffix('').as_posix().replace('/', '.')}" for path in generated}
    for path in generated:
        assert not {name for name in imports(path) if "_async." in f"{name}." and name.startswith("holdfast.")}, path
        used = imports(path.with_name(f"{path.stem}_async.py"))
        assert not {name for name in used if name in names or name.rpartition(".")[0] in names}, path
