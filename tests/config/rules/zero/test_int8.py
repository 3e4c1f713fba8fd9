"""Gathers in int8: whole blocks, of all matrices, rounded once, and advice that can be taken."""

from __future__ import annotations

import pytest

from echelon.config.load import load_job
from tests.config.problems import problems_of
from tests.config.suggestions import taken

FP8 = ["precision.matmul=fp8", "precision.fp8_block=32"]
INT8 = ["mesh.dp_shard=2", "zero.gather=int8"]


@pytest.mark.parametrize(
    ("sets", "rule", "says"),
    [
        (
            [*INT8, "zero.stage=3"],
            "int8-block-divides",
            "rows of ffn numbers / mesh.tp = 352 / 1 are no multiple of zero.int8_block = 128",
        ),
        (
            [*INT8, "zero.stage=3", "zero.int8_block=32", "mesh.tp=2"],
            "int8-block-divides",
            "352 / 2",
        ),
        ([*INT8, "zero.stage=2", "zero.int8_block=32"], "int8-gather-of-all", "2 < 3"),
        (
            [*INT8, "zero.stage=3", "zero.int8_block=32", "zero.keep_whole_below=200"],
            "int8-gather-of-all",
            "zero.keep_whole_below = 200",
        ),
        (
            [*INT8, "zero.stage=3", "zero.int8_block=32", *FP8],
            "int8-gather-rounds-once",
            "floats of 8 bits",
        ),
        (["zero.int8_block=32"], "no-effect", "rounds nothing to int8"),
    ],
)
def test_what_cannot_be_gathered_in_int8_is_refused(sets: list[str], rule: str, says: str) -> None:
    found = problems_of("nano", sets)
    assert rule in found
    assert says in found[rule].message
    assert found[rule].suggestions
    for advice in found[rule].suggestions:
        assert rule not in problems_of("nano", taken(advice, sets)), advice


def test_int8_is_mathematics_and_where_it_is_gathered_the_layout() -> None:
    plan = load_job("nano", [*INT8, "zero.stage=3", "zero.int8_block=32"]).plan
    assert (plan.mathematics.precision.int8_block, plan.layout.zero.gather) == (32, "int8")
    plain = load_job("nano", ["mesh.dp_shard=2", "zero.stage=3"]).plan
    assert plain.mathematics.precision.int8_block == 0
    assert not plain.same_mathematics(plan)
