"""What is cut over tp comes out even, and degrees that are suggested work."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.problems import SMALL, problems_of, write


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write(tmp_path, SMALL)


def test_every_degree_that_is_suggested_for_tp_is_accepted(small: Path) -> None:
    for value in problems_of(small, ["mesh.tp=4"])["tp-divides-kv-heads"].suggestions:
        assert problems_of(small, [f"mesh.tp={value}"]) == {}


def test_the_vocabulary_need_not_divide(small: Path) -> None:
    assert problems_of(small, ["mesh.tp=2", "model.vocab=301"]) == {}
