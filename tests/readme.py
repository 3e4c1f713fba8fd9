"""The README's blocks that begin with `$`, and what the commands in them print.

``python -m tests.readme`` writes them, the figures and the pages of features again;
`test_readme.py` compares.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from echelon.cli.main import main
from tests import features

README = Path(__file__).resolve().parent.parent / "README.md"
BLOCK = re.compile(r"```console\n\$ ((?:echelon|python) [^\n]*)\n(.*?)```", re.DOTALL)

FIGURES = {"docs/schedules.svg": "echelon schedule show zb-v -p 4 -m 8"}
"""Each figure of the README, and the command that draws it with `--svg`."""


def printed(command: str) -> str:
    """Return what `command` prints, both streams as a terminal shows them."""
    program, *words = shlex.split(command)
    if program == "python":
        return subprocess.run(
            [sys.executable, "-W", "error", *words],
            cwd=README.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=True,
            timeout=120,
        ).stdout
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        main(words)
    return output.getvalue()


def timeless(text: str) -> str:
    """Return `text` without how long a search took, which no two runs agree on."""
    return re.sub(r"(legal plans in) [0-9.]+ s", r"\1 N s", text)


def drawn(command: str) -> str:
    """Return the figure that `command` writes where `--svg` says."""
    with tempfile.TemporaryDirectory() as folder:
        figure = Path(folder, "figure.svg")
        printed(f"{command} --svg {shlex.quote(str(figure))}")
        return figure.read_text(encoding="utf-8")


def rewritten(text: str) -> str:
    """Return the README's text with every block as its command prints it now."""
    return BLOCK.sub(_rewritten, text)


def _rewritten(match: re.Match[str]) -> str:
    now = printed(match[1])
    kept = match[2] if timeless(match[2]) == timeless(now) else now
    return f"```console\n$ {match[1]}\n{kept}```"


if __name__ == "__main__":
    README.write_text(rewritten(README.read_text(encoding="utf-8")), encoding="utf-8")
    for path, command in FIGURES.items():
        (README.parent / path).write_text(drawn(command), encoding="utf-8")
    features.write()
