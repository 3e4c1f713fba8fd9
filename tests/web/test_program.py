"""What the page computes of Python's functions, and what it is given in their place."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from echelon.core.messages.plurals import in_singular
from tests.web.test_formulas import COMPILED, node
from web.formulas.program import explorer_program

TEXTS = (
    "1 ranks of 11 ranks",
    "pp 1 stages x 1 microbatches, 21 steps",
    "each of 1 blocks are recomputed",
    "rank 1 holds 3 buffers",
    "4 x 1 ranks (1 nodes)",
    "nothing to count",
)


@pytest.mark.parametrize("text", TEXTS)
def test_the_page_writes_one_of_something_as_python_does(text: str, tmp_path: Path) -> None:
    given = explorer_program().given[in_singular]
    arguments = re.fullmatch(r"\$rt\.singular\.bind\(null, (.*)\)", given)
    assert arguments is not None
    script = tmp_path / "ask.mjs"
    runtime = json.dumps((COMPILED / "runtime.js").as_uri())
    script.write_text(
        f"import {{ singular }} from {runtime};\n"
        f"console.log(JSON.stringify(singular({arguments[1]}, {json.dumps(text)})));\n",
        encoding="utf-8",
    )
    done = subprocess.run([*node(), str(script)], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == in_singular(text)
