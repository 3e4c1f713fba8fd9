"""The README's blocks that begin with `$ echelon`, and what the commands in them print.

``python -m tests.readme`` writes them again; `test_readme.py` compares.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

from echelon.cli.main import main

README = Path(__file__).resolve().parent.parent / "README.md"
BLOCK = re.compile(r"```console\n\$ (echelon [^\n]*)\n(.*?)```", re.DOTALL)


def printed(command: str) -> str:
    """Return what `command` prints, both streams as a terminal shows them."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        main(shlex.split(command)[1:])
    return output.getvalue()


def rewritten(text: str) -> str:
    """Return the README's text with every block as its command prints it now."""
    return BLOCK.sub(lambda match: f"```console\n$ {match[1]}\n{printed(match[1])}```", text)


if __name__ == "__main__":
    README.write_text(rewritten(README.read_text(encoding="utf-8")), encoding="utf-8")
