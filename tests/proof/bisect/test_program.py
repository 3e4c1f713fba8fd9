"""The numbers of a program are halved as long as it fails as it did."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from echelon.core.errors import ConfigError
from echelon.core.rulebook.verify import VERIFY_RAISED
from echelon.proof.bisect.program import bisect_program, numbers_of, with_number
from tests.proof.bisect.test_bisect import diagnosis

SOURCE = '''"""A program."""
MESH = {"dp": 4, "tp": 2}  # axes by name
MICROBATCHES = 6
LAYERS = 8
SEED = 7
NAME = "\u00e9"; WIDTH = 16
LEARNING_RATE = 0.1
'''


def values(source: str) -> dict[str, int]:
    return {"".join(number.place): number.value for number in numbers_of(source)}


def bisected(tmp_path: Path, judge: Callable[[dict[str, int]], str]) -> tuple[Any, list[str]]:
    file = tmp_path / "program.py"
    file.write_text(SOURCE, encoding="utf-8")
    (tmp_path / "beside.py").write_text("", encoding="utf-8")
    asked: list[str] = []

    def verify(subject: str) -> Any:
        path, _, function = subject.partition(":")
        assert function == "wrong"
        assert (Path(path).parent / "beside.py").is_file()
        asked.append(Path(path).read_text(encoding="utf-8"))
        rule = judge(values(asked[-1]))
        return SimpleNamespace(diagnosis=diagnosis(rule) if rule else None)

    return bisect_program(f"{file}:wrong", verify), asked


def test_numbers_are_those_in_capitals() -> None:
    assert values(SOURCE) == {
        "MESHdp": 4,
        "MESHtp": 2,
        "MICROBATCHES": 6,
        "LAYERS": 8,
        "WIDTH": 16,
    }
    assert values(with_number(SOURCE, "WIDTH", 300))["WIDTH"] == 300
    assert values(with_number(SOURCE, "NUM_STEPS", 2))["NUM_STEPS"] == 2


def test_what_the_failure_needs_is_kept(tmp_path: Path) -> None:
    found, asked = bisected(
        tmp_path, lambda at: "verify-gradients" if at["MESHdp"] > 1 and at["LAYERS"] > 3 else ""
    )
    (source,) = found.files.values()
    assert values(source) == {
        "MESHdp": 2,
        "MESHtp": 1,
        "MICROBATCHES": 1,
        "LAYERS": 4,
        "WIDTH": 1,
        "NUM_STEPS": 2,
    }
    assert {one.name: one.without for one in found.needed} == {
        "MESH['dp'] = 2": "proven",
        "LAYERS = 4": "proven",
    }
    assert found.left_out == ("MESH['tp'] = 2", "MICROBATCHES = 6", "WIDTH = 16")
    assert found.sizes == {"ranks": 2, "steps": 2}
    assert found.num_proofs == len(asked)


def test_a_program_that_raises_does_not_fail_in_the_same_way(tmp_path: Path) -> None:
    def judge(at: dict[str, int]) -> str:
        if at["WIDTH"] < 16:
            raise ConfigError(VERIFY_RAISED.problem("ValueError: too narrow"))
        return "verify-gradients"

    found, _ = bisected(tmp_path, judge)
    (source,) = found.files.values()
    assert values(source)["WIDTH"] == 16
    (needed,) = found.needed
    assert needed.name == "WIDTH = 16"
    assert "too narrow" in needed.without


def test_of_a_right_program_nothing_is_looked_for(tmp_path: Path) -> None:
    assert bisected(tmp_path, lambda at: "")[0] is None


@pytest.mark.slow
def test_a_wrong_program_is_made_smaller() -> None:
    from echelon.api.verifying import bisect_program as bisect

    file = Path(__file__).parents[3] / "examples" / "wrong" / "mean_of_means.py"
    found = bisect(file)
    assert found is not None
    assert {one.name for one in found.needed} == {"MICROBATCHES = 2"}
    assert found.sizes["ranks"] == 1
