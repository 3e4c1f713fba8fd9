"""Live values are written out, or refused."""

from __future__ import annotations

import pytest

from web.formulas.compiler.names import CompiledProgram, NotCompiled, Reached, constant_text


def test_values_are_written_out_and_large_numbers_are_refused() -> None:
    reached = Reached(program=CompiledProgram(entries=()))
    found = constant_text({"a": (1, -2.5, None, True, float("inf"))}, reached)
    assert found == '$rt.dict([["a", [1, (-2.5), null, true, Infinity]]])'
    with pytest.raises(NotCompiled):
        constant_text(2**60, reached)
