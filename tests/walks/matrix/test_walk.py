"""The walk over the matrix of layouts, and a random part of it proven in each run."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from echelon.launch.local.supervisor import RankPool
from tests.walks import shortened
from tests.walks.matrix import walk as matrix
from tests.walks.matrix.block_cases import block_cases
from tests.walks.matrix.cases import MatrixCase, cases
from tests.walks.matrix.context_cases import context_cases
from tests.walks.matrix.expert_cases import expert_cases
from tests.walks.matrix.pipeline_cases import pipeline_cases
from tests.walks.matrix.recompute_cases import recompute_cases
from tests.walks.matrix.walk import (
    every_case,
    families,
    main,
    prove_case,
    prove_cases,
    sample,
    share_of_each,
)
from tests.walks.matrix.zero_cases import zero_cases

COUNT = 36
SEED = random.SystemRandom().randrange(10**6)


def test_the_whole_matrix_is_all_seven() -> None:
    parts = (
        list(cases()),
        list(zero_cases()),
        list(pipeline_cases()),
        list(context_cases()),
        list(expert_cases()),
        list(recompute_cases()),
        list(block_cases()),
    )
    names = [case.name for part in parts for case in part]
    assert [case.name for case in every_case()] == names
    assert len(set(names)) == len(names)


def test_a_sample_is_a_function_of_its_seed() -> None:
    assert sample(10, seed=1) == sample(10, seed=1) != sample(10, seed=2)
    assert len(set(sample(60, seed=3))) == 60


@pytest.mark.system("S39", "S40")
@pytest.mark.quick("18")
# Of each kind come three cases of few ranks, then three of more: one of each is quick.
@pytest.mark.parametrize("number", shortened(range(COUNT), lambda number: number % 3 == 0))
def test_a_random_part_is_proven(number: int, rank_pool: RankPool) -> None:
    # By number, not by name: the workers of a parallel test run must collect the same tests.
    case = sample(COUNT, SEED)[number]
    print(f"seed {SEED}, case {case.name}")
    problem = prove_case(case, rank_pool.run)
    assert not problem, f"python -m tests.walks.matrix.walk --match {case.name}\n{problem}"


def test_a_walk_takes_up_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    walked: list[str] = []

    def pretend(case: MatrixCase, run_ranks: object, *, late: bool) -> str:
        assert not late
        walked.append(case.name)
        return "error: wrong" if "-tp2" in case.name else ""

    monkeypatch.setattr(matrix, "prove_case", pretend)
    chosen = [case for case in cases() if case.pp == 1 and case.dp == 1]
    results = tmp_path / "matrix.jsonl"
    wrong = sum(case.tp == 2 for case in chosen)

    assert prove_cases(chosen, results) == wrong
    assert len(walked) == len(chosen)
    assert f"{len(chosen) - wrong} of {len(chosen)} proven" in capsys.readouterr().out
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    assert [line["name"] for line in lines] == walked

    walked.clear()
    assert prove_cases(chosen, results) == wrong
    assert len(walked) == wrong


def test_a_share_is_taken_of_each_family() -> None:
    chosen = {case.name for case in share_of_each(0.1, seed=3)}
    for family in families():
        assert len(chosen & {case.name for case in family}) == math.ceil(0.1 * len(family))
    assert {case.name for case in share_of_each(1, seed=3)} == {case.name for case in every_case()}
    assert chosen == {case.name for case in share_of_each(0.1, seed=3)}
    assert chosen != {case.name for case in share_of_each(0.1, seed=4)}


@pytest.mark.parametrize("share", ["0", "1.5", "-1"])
def test_a_share_that_is_none_is_refused(share: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--share", share])
    assert "above 0 and at most 1" in capsys.readouterr().err
