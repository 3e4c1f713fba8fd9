"""The pages for readers: README.md, CONTRIBUTING.md and docs/, and what the commands in them do.

A `console` block that begins with `$` is what its command prints: ``python -m tests.docs.readme``
writes such blocks of every page, the figures and all generated pages again, and `test_readme.py`
compares. Commands of `sh` blocks are run by `test_doc_commands.py`.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from unittest.mock import patch

from echelon.cli import output as stderr
from echelon.cli.main import main
from tests.docs import doc_pages, features

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
BLOCK = re.compile(r"```console\n\$ ((?:echelon|python) [^\n]*)\n(.*?)```", re.DOTALL)

_PIPELINE = "echelon plan nano --set mesh.pp=4 --set model.layers=16"
_CLUSTER = (
    "echelon plan llama3-8b --set cluster.preset=16xh100 --set mesh.pp=2 --set mesh.dp_shard=4 "
    "--set mesh.tp=2 --set zero.stage=1"
)
_REHEARSAL = "echelon rehearse nano --set cluster.preset=8xh100 --set mesh.pp=2 --whole"
_PROOF = "echelon prove nano --set mesh.tp=2 --set mesh.dp_shard=2 --set zero.stage=3"
GALLERY = "docs/assets/gallery"
FIGURES = {
    "docs/schedules.svg": "echelon schedule show zb-v -p 4 -m 8 --out FILE",
    f"{GALLERY}/schedule-zb-v.svg": f"{_PIPELINE} --set pipeline.schedule=zb-v --out schedule/",
    f"{GALLERY}/schedule-1f1b.svg": f"{_PIPELINE} --out schedule/",
    f"{GALLERY}/mesh.svg": f"{_CLUSTER} --out mesh/",
    f"{GALLERY}/memory.svg": f"{_CLUSTER} --out memory/",
    f"{GALLERY}/step.svg": f"{_CLUSTER} --out step/",
    f"{GALLERY}/curve.svg": f"{_REHEARSAL} --out memory-curve/",
    f"{GALLERY}/proof.svg": f"{_PROOF} --out proof/",
}
"""Each figure of a page, and the command that draws it: into FILE, or with others into a folder.

The folder is called as the figure that is kept. What a proof compares differs in its last bits from
machine to machine: of its figure the numbers are not compared.
"""
SLOW = frozenset(one for one, by in FIGURES.items() if by.startswith((_REHEARSAL, _PROOF)))
"""Figures of commands that start ranks."""

HISTORY = DOCS / "decisions"
"""Decisions are not edited: what they name may have moved since."""


def pages() -> tuple[Path, ...]:
    """Return every page that says how things are now."""
    guides = (page for page in DOCS.rglob("*.md") if not page.is_relative_to(HISTORY))
    return (README, ROOT / "CONTRIBUTING.md", HISTORY / "026-rooms.md", *sorted(guides))


@cache
def printed(command: str) -> str:
    """Return what `command` prints, both streams as a terminal shows them.

    Two pages may show the same command: it is run once.
    """
    command, piped, count = command.partition(" | head -")
    if piped:
        return "".join(printed(command).splitlines(keepends=True)[: int(count)])
    program, *words = shlex.split(command)
    if program == "python":
        ended = subprocess.run(
            [sys.executable, "-W", "error", *words],
            cwd=ROOT,
            # What is piped has no columns, whatever those of the tests are.
            env={name: value for name, value in os.environ.items() if name != "COLUMNS"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=240,
        )
        assert ended.returncode == 0, ended.stdout
        return ended.stdout
    output = io.StringIO()
    # A slow machine would show more lines about the progress of work.
    silent = patch.object(stderr, "SHOWN_AFTER_S", 1e6)
    with silent, contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = main(words)
    # A page may show a proof that fails.
    assert words[0] != "prove" or code in (0, 1), output.getvalue()
    return output.getvalue()


def comparable(text: str) -> str:
    """Return `text` without what no two machines agree on.

    That is how long a search took, and the last bits of what a proof compares.
    """
    text = re.sub(r"(legal plans in) [0-9.]+ s", r"\1 N s", text)
    return re.sub(r"\d\.\de[-+]\d\d of \d\.\de-\d\d", "ERROR of TOLERANCE", text)


@cache
def drawn(command: str) -> str:
    """Return the figure that `command` writes into FILE, or by its name into the folder."""
    command, _, where = command.rpartition(" ")
    with tempfile.TemporaryDirectory() as folder:
        if where == "FILE":
            figure = Path(folder, "figure.svg")
            printed(f"{command} {shlex.quote(str(figure))}")
            return figure.read_text(encoding="utf-8")
        figures = Path(folder, "figures")
        printed(f"{command} {shlex.quote(f'{figures}/')}")
        return (figures / f"{where.rstrip('/')}.svg").read_text(encoding="utf-8")


def comparable_figure(path: str, text: str) -> str:
    """Return a figure without what no two machines agree on."""
    if not FIGURES[path].startswith(_PROOF):
        return text
    return re.sub(r"equal|\d[\d.e+-]*( %)?", "N", text)


def rewritten(text: str) -> str:
    """Return the text of a page with every block as its command prints it now."""
    return BLOCK.sub(_rewritten, text)


def _rewritten(match: re.Match[str]) -> str:
    now = printed(match[1])
    kept = match[2] if comparable(match[2]) == comparable(now) else now
    return f"```console\n$ {match[1]}\n{kept}```"


if __name__ == "__main__":
    for page in pages():
        page.write_text(rewritten(page.read_text(encoding="utf-8")), encoding="utf-8")
    for path, command in FIGURES.items():
        kept, now = ROOT / path, drawn(command)
        before = kept.read_text(encoding="utf-8") if kept.exists() else ""
        if comparable_figure(path, before) != comparable_figure(path, now):
            kept.parent.mkdir(exist_ok=True)
            kept.write_text(now, encoding="utf-8")
    features.write()
    doc_pages.write()
