"""Draws docs/explanation/architecture.svg from the real imports; with --check, compares and writes nothing.

The rows are the layers of the import contract in pyproject.toml. A line from one box to a lower one means that a module
of the first imports a module of the second; it is faint if other boxes already connect the two. Imports that only a
type checker sees are left out.
"""

from __future__ import annotations

import argparse
import ast
import sys
import tomllib
from html import escape
from pathlib import Path
from textwrap import wrap

import grimp

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "holdfast"
PICTURE = ROOT / "docs" / "explanation" / "architecture.svg"
WIDTH, ROW, BOX, GAP, MARGIN = 1180, 104, 70, 22, 24
STYLE = """
  text { font-family: system-ui, sans-serif; fill: #1a2733 }
  .name { font-size: 15px; font-weight: 600 }
  .about { font-size: 10.5px; fill: #4a5a68 }
  .box { fill: #fff; stroke: #2c5d8f; stroke-width: 1.2 }
  .uses { fill: none; stroke: #2c5d8f; stroke-opacity: .16 }
  .next { fill: none; stroke: #2c5d8f; stroke-opacity: .75; stroke-width: 1.4 }
"""


def layers() -> list[list[str]]:
    """Names of the contract, highest layer first; the two flavours of a module are one box."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    rows = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    names = [[name.strip().removeprefix("holdfast.") for name in row.split("|")] for row in rows]
    return [[name for name in row if not name.endswith("_async")] for row in names]


def edges(names: set[str]) -> list[tuple[str, str]]:
    graph = grimp.build_graph("holdfast", exclude_type_checking_imports=True, cache_dir=None)
    pairs: set[tuple[str, str]] = set()
    for module in graph.modules:
        source = _box(module)
        targets = {_box(imported) for imported in graph.find_modules_directly_imported_by(module)}
        pairs |= {(source, target) for target in targets if source in names and target in names - {source}}
    return sorted(pairs)


def _box(module: str) -> str:
    return (module.split(".")[1] if "." in module else "").removesuffix("_async")


def _is_implied(source: str, target: str, lines: list[tuple[str, str]]) -> bool:
    """Whether another path connects the two: such a line is faint."""
    reached, todo = set(), [end for start, end in lines if start == source and end != target]
    while todo:
        if (box := todo.pop()) not in reached:
            reached.add(box)
            todo += [end for start, end in lines if start == box]
    return target in reached


def about(name: str) -> str:
    """The first sentence of its docstring, without a short introduction before a colon."""
    path = PACKAGE / name / "__init__.py"
    text = ast.get_docstring(ast.parse((path if path.exists() else PACKAGE / f"{name}.py").read_text())) or ""
    sentence = " ".join(text.split()).split(". ")[0].rstrip(".")
    head, colon, rest = sentence.partition(": ")
    return rest if colon and len(head.split()) < 4 else sentence


def draw() -> str:
    rows = layers()
    places: dict[str, tuple[float, float, float]] = {}
    for number, row in enumerate(rows):
        width = (WIDTH - 2 * MARGIN - GAP * (len(row) - 1)) / len(row)
        width = min(width, 420)
        left = (WIDTH - width * len(row) - GAP * (len(row) - 1)) / 2
        for place, name in enumerate(row):
            places[name] = left + place * (width + GAP), MARGIN + number * ROW, width
    size, label = (
        f"0 0 {WIDTH} {2 * MARGIN + ROW * len(rows) - ROW + BOX}",
        "Folders of holdfast by layer, and which imports which",
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" role="img" aria-label="{label}">',
        f"<style>{STYLE}</style>",
        '<rect width="100%" height="100%" fill="#f7f9fb"/>',
    ]
    lines = edges(set(places))
    for source, target in lines:
        (x, y, width), (to_x, to_y, to_width) = places[source], places[target]
        if to_y > y:
            start, end = (x + width / 2, y + BOX), (to_x + to_width / 2, to_y)
            bend = min(60.0, (end[1] - start[1]) / 2)
            kind = "uses" if _is_implied(source, target, lines) else "next"
            parts.append(
                f'<path class="{kind}" d="M{start[0]:.0f} {start[1]:.0f} C{start[0]:.0f} {start[1] + bend:.0f} '
                f'{end[0]:.0f} {end[1] - bend:.0f} {end[0]:.0f} {end[1]:.0f}"/>'
            )
    for name, (x, y, width) in places.items():
        parts.append(f'<rect class="box" x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{BOX}" rx="6"/>')
        parts.append(f'<text class="name" x="{x + 10:.0f}" y="{y + 20:.0f}">{escape(name)}</text>')
        for line, text in enumerate(wrap(about(name), int(width / 5.9))[:3]):
            parts.append(f'<text class="about" x="{x + 10:.0f}" y="{y + 35 + 13 * line:.0f}">{escape(text)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    picture = draw()
    if not parser.parse_args().check:
        PICTURE.write_text(picture, encoding="utf-8")
    elif not PICTURE.exists() or PICTURE.read_text(encoding="utf-8") != picture:
        print(f"{PICTURE.relative_to(ROOT)} is not current: run 'make picture'", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
