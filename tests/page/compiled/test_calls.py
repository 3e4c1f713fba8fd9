"""Of calls the compiler refuses those that it does not know, with file and line."""

from __future__ import annotations

import pytest

from echelon.page.compiled.calls import __doc__ as said
from echelon.page.compiled.module import module_text
from echelon.page.compiled.names import CompiledProgram, NotCompiled
from tests.page.compiled.programs import with_an_unknown_call


def test_what_is_not_known_is_refused() -> None:
    assert said
    with pytest.raises(NotCompiled, match=r"programs\.py:\d+: "):
        module_text(CompiledProgram(entries=(with_an_unknown_call,)))
