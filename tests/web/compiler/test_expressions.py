"""Of expressions the compiler refuses those that it does not know, with file and line."""

from __future__ import annotations

import pytest

from tests.web.compiler.programs import with_identity
from web.formulas.compiler.expressions import __doc__ as said
from web.formulas.compiler.module import module_text
from web.formulas.compiler.names import CompiledProgram, NotCompiled


def test_what_is_not_known_is_refused() -> None:
    assert said
    with pytest.raises(NotCompiled, match=r"programs\.py:\d+: "):
        module_text(CompiledProgram(entries=(with_identity,)))
