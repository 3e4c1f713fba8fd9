"""What tensor ranks refuse together in their first step, and what a module says of its split."""

from __future__ import annotations

import pytest

from echelon.api.parallelizing import parallelize
from echelon.core.errors import EchelonError
from echelon.launch.context import RankContext
from echelon.launch.local.supervisor import RankPool
from tests.parallel.module.refusals import refusal
from tests.parallel.module.tensor.families import OWN_RULES, Own, batch, loss_of
from tests.parallel.module.tensor.test_layers import loop_of


def mistaken(context: RankContext, mistake: str) -> tuple[str, str]:
    """Return the rule by which this rank's first step is refused, and what it says."""
    rules = dict(OWN_RULES)
    if mistake == "whole norm":
        del rules["blocks.*.attention.scale"]
    layout = "tp2 sequence" if mistake == "length" else "tp2"
    model, optimizer = parallelize(Own().double(), loop_of("own", layout).plan, tensor=rules)
    ids = batch(0, context.rank if mistake == "batch" else 0, 7 if mistake == "length" else 8)
    try:
        loss_of(model, ids).backward()
        if mistake == "saved":
            model.state_dict()
        optimizer.step()
    except EchelonError as error:
        return error.rules[0], str(error)
    return "", ""


@pytest.mark.parametrize(
    ("mistake", "rule", "told"),
    [
        ("batch", "module-tensor-ranks", "tensor ranks 0 and 1 are given other inputs"),
        pytest.param(
            "whole norm",
            "module-tensor-ranks",
            "gradient of blocks.0.attention.scale",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "length", "module-sequence", "7 positions came to blocks.0", marks=pytest.mark.slow
        ),
        pytest.param("saved", "values-away", "optimizer.save(PATH)", marks=pytest.mark.slow),
    ],
)
def test_a_first_step_that_is_refused(
    rank_pool: RankPool, mistake: str, rule: str, told: str
) -> None:
    for broken, text in rank_pool.run(mistaken, mistake, world_size=2, timeout_s=120.0):
        assert broken == rule
        assert told in text


def test_a_guess_is_not_trusted() -> None:
    plan = loop_of("own", "tp2").plan
    error = refusal(
        lambda: parallelize(Own().double(), plan, tensor="guess", example=(batch(0, 0),))
    )
    assert error.rules == ("module-tensor-guess",)
    assert "blocks.*.attention.qkv" in str(error)
