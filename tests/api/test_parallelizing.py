"""Words that a caller may say wrong are refused at once, all of them, before torch is needed."""

from __future__ import annotations

from typing import Any, cast

import pytest

import echelon as ec
from echelon.core.errors import ConfigError


def test_every_wrong_word_is_told_with_those_that_work() -> None:
    words = cast("Any", {"unused": "none", "gradients": "max", "learning_rate": "plan"})
    with pytest.raises(ConfigError) as caught:
        ec.parallelize(cast("Any", object()), ec.plan("nano"), **words)
    assert [(one.key, one.suggestions) for one in caught.value.problems] == [
        ("unused", ("unused='error'", "unused='zero'")),
        ("gradients", ("gradients='mean'", "gradients='sum'")),
    ]
    assert caught.value.rules == ("module-argument", "module-argument")
