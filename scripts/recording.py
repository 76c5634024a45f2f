"""Runs the demo on PostgreSQL and draws what it prints as docs/demo.svg, an animation in which each line appears when
it was printed.

    .venv/bin/python scripts/recording.py

It needs no other program. Nothing is drawn if anything that the demo printed was not true.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from html import escape
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "demo.svg"
COMMAND = "make demo ARGS=--postgres"
COLUMNS, CELL, LINE, MARGIN = 100, 8.43, 17, 20
_CONSOLE = Console()
STYLE = """
  text { font: 14px ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #c9d1d9; white-space: pre }
  .bold { font-weight: bold } .dim { fill: #8b949e }
  .color1 { fill: #ff7b72 } .color2 { fill: #56d364 } .color3 { fill: #e3b341 }
  text { animation: show 1ms linear both } @keyframes show { from { visibility: hidden } to { visibility: visible } }
  @media (prefers-reduced-motion) { text { animation: none } }
"""


def record() -> list[tuple[float, Text]]:
    """Runs the demo. Returns the lines that it prints, with the seconds since its first one."""
    environment = {**os.environ, "FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    command = [sys.executable, str(ROOT / "examples" / "demo.py"), "--postgres"]
    lines, began = [], 0.0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            began = began or time.monotonic()
            lines.append((time.monotonic() - began, Text.from_ansi(line.rstrip())))
    if process.returncode:
        sys.exit(f"the demo ended with {process.returncode}")
    return lines


def draw(lines: list[tuple[float, Text]]) -> str:
    width = round(max(COLUMNS, *(cell_len(line.plain) for _, line in lines)) * CELL + 2 * MARGIN)
    rows = [(0.0, Text.assemble(("$ ", "dim"), COMMAND)), (0.0, Text()), *lines]
    drawn = [
        f'<text x="{MARGIN}" y="{MARGIN + (number + 1) * LINE}" style="animation-delay:{at:.2f}s">{_spans(line)}</text>'
        for number, (at, line) in enumerate(rows)
        if line.plain
    ]
    height = 2 * MARGIN + (len(rows) + 1) * LINE
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">',
        f"<title>What {COMMAND} prints, recorded by scripts/recording.py</title>",
        f"<style>{STYLE}</style>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#0d1117"/>',
        *drawn,
        "</svg>\n",
    ])  # fmt: skip


def _spans(line: Text) -> str:
    parts = []
    for segment in line.render(_CONSOLE, end=""):
        style = segment.style or Style()
        named = [("bold", style.bold), ("dim", style.dim)]
        if style.color is not None:
            named.append((f"color{style.color.number}", True))
        classes = [name for name, is_set in named if is_set]
        text = escape(segment.text, quote=False)
        parts.append(f'<tspan class="{" ".join(classes)}">{text}</tspan>' if classes else text)
    return "".join(parts)


if __name__ == "__main__":
    PICTURE.write_text(draw(record()), encoding="utf-8")
    print(f"{PICTURE.relative_to(ROOT)} was drawn")
