"""What functions and methods are called in the page is there."""

from __future__ import annotations

import re

from tests.web.test_formulas import COMPILED
from web.formulas.compiler.calls import FUNCTIONS, METHODS


def test_the_runtime_has_everything_that_is_compiled_to_it() -> None:
    text = (COMPILED / "runtime.js").read_text(encoding="utf-8")
    there = set(re.findall(r"^export (?:const|function) (\w+)", text, re.MULTILINE))
    wanted = {name.removeprefix("$rt.") for name in FUNCTIONS.values() if name.startswith("$rt.")}
    assert wanted | set(METHODS.values()) <= there
