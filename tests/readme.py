"""The README's blocks that begin with `$`, and what the commands in them print.

``python -m tests.readme`` writes them and the page of features again; `test_readme.py` compares.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

from echelon.cli.main import main
from tests import features

README = Path(__file__).resolve().parent.parent / "README.md"
BLOCK = re.compile(r"```console\n\$ ((?:echelon|python) [^\n]*)\n(.*?)```", re.DOTALL)


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


def rewritten(text: str) -> str:
    """Return the README's text with every block as its command prints it now."""
    return BLOCK.sub(lambda match: f"```console\n$ {match[1]}\n{printed(match[1])}```", text)


if __name__ == "__main__":
    README.write_text(rewritten(README.read_text(encoding="utf-8")), encoding="utf-8")
    features.write()
