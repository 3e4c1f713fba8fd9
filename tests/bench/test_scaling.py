"""Strong and weak scaling: both definitions, and that the engine is really what is timed."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.harness.spec import SIZES
from bench.scaling import Scaling, loads, measure, report, scaling_of

TINY = SIZES["tiny"]


def test_perfect_scaling_is_one_by_both_definitions() -> None:
    perfect = Scaling(ranks=4, one_s=8.0, strong_s=2.0, weak_s=8.0)
    assert (perfect.speed_up, perfect.strong_efficiency, perfect.weak_efficiency) == (4, 1, 1)


def test_one_busy_core_gains_nothing_from_a_second_rank() -> None:
    shared = Scaling(ranks=2, one_s=3.0, strong_s=3.0, weak_s=6.0)
    assert (shared.speed_up, shared.strong_efficiency, shared.weak_efficiency) == (1, 0.5, 0.5)


@pytest.mark.system("S57")
def test_strong_scaling_keeps_the_batch_and_weak_scaling_that_of_a_rank() -> None:
    assert [(one.ranks, one.sequences) for one in loads(TINY, 2)] == [(1, 8), (2, 8), (2, 16)]
    with pytest.raises(ValueError, match="8 sequences cannot be shared out to 3 ranks"):
        loads(TINY, 3)


@pytest.mark.system("S57")
def test_the_report_shows_medians_and_both_definitions() -> None:
    taken = {"one": [4.0, 3.8, 9.0], "strong": [2.0, 2.5, 2.4], "weak": [5.0, 5.0, 5.0]}
    assert scaling_of(2, taken).strong_s == 2.4
    assert report(loads(TINY, 2), taken).splitlines()[2:] == [
        "| one | 1 | 8 | 4.000 | 130% |",
        "| strong | 2 | 8 | 2.400 | 21% |",
        "| weak | 2 | 16 | 5.000 | 0% |",
        "strong scaling, the same 8 sequences on 2 ranks: speed-up T(1) / T(2) = 1.67, "
        "efficiency T(1) / (2 T(2)) = 0.83",
        "weak scaling, 8 sequences on each rank: efficiency T(1) / T(2) = 0.80",
    ]


@pytest.mark.system("S57")
@pytest.mark.slow
def test_the_engine_is_timed_on_every_load(tmp_path: Path) -> None:
    taken = measure(TINY, loads(TINY, 2), rounds=1, steps=1, logs=tmp_path)
    assert {name: len(values) for name, values in taken.items()} == {
        "one": 1,
        "strong": 1,
        "weak": 1,
    }
    assert all(value > 0 for values in taken.values() for value in values)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {
        "one-dp1-one-rank0.log",
        *(f"{kind}-dp2-{kind}-rank{rank}.log" for kind in ("strong", "weak") for rank in (0, 1)),
    }
