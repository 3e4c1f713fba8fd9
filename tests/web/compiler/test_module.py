"""Single constructs mean in the page what they mean in Python; the others are refused."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.web.compiler.programs import PROGRAMS, REFUSED
from tests.web.test_formulas import COMPILED, node
from web.formulas.compiler.module import module_text
from web.formulas.compiler.names import CompiledProgram, NotCompiled

NUMBERS = ((1.0, 2.0), (7.0, 3.0), (-7.0, 3.0), (0.0, 2.0), (2.5, 0.7), (3.0, 3.0), (1e9, 7.0))


def plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if value is None or isinstance(value, (bool, str)):
        return value
    return bool(value) if type(value).__name__ in ("bool", "bool_") else float(value)


def test_constructs_mean_what_they_mean_in_python(tmp_path: Path) -> None:
    shutil.copy(COMPILED / "runtime.js", tmp_path / "runtime.js")
    (tmp_path / "package.json").write_text('{"type": "module"}')
    text = module_text(CompiledProgram(entries=PROGRAMS, read=frozenset(("sum",))))
    (tmp_path / "formulas.js").write_text(text, encoding="utf-8")
    names = [one.__name__ for one in PROGRAMS]
    script = f"import * as all from './formulas.js';\nconst rows = {json.dumps(NUMBERS)};\n"
    script += f"const told = {json.dumps(names)}.map((n) => rows.map(([a, b]) => all[n](a, b)));\n"
    script += "console.log(JSON.stringify(told));\n"
    (tmp_path / "ask.mjs").write_text(script, encoding="utf-8")
    done = subprocess.run(
        [*node(), "ask.mjs"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for function, told in zip(PROGRAMS, json.loads(done.stdout), strict=True):
        for (a, b), found in zip(NUMBERS, told, strict=True):
            assert found == plain(function(a, b)), (function.__name__, a, b)


@pytest.mark.parametrize("function", REFUSED, ids=lambda one: one.__name__)
def test_what_has_no_counterpart_is_refused_with_its_line(function: Any) -> None:
    with pytest.raises(NotCompiled) as caught:
        module_text(CompiledProgram(entries=(function,)))
    first = function.__code__.co_firstlineno
    lines = [str(line) for line in range(first, first + 6)]
    assert any(f"programs.py:{line}" in str(caught.value) for line in lines), caught.value
