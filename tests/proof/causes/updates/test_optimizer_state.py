"""An update made from an older state, or from another tensor's, is told so, and no other one is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from echelon.core.parameters import parameters
from echelon.proof.causes.finding import ProofFinding
from echelon.proof.causes.updates.optimizer_constants import ReplayedUpdate, explain_state
from echelon.proof.causes.updates.updates import explain_muon_scale, explain_update
from echelon.proof.claims.checks import Check
from echelon.proof.oracle.optimizers import OptimizerState
from echelon.proof.oracle.oracle import OracleStep, run_oracle
from echelon.proof.ranks import ObservedShard
from echelon.proof.shrink import shrink
from tests.proof.layouts import layout
from tests.proof.replicas import replicas

PLAN = shrink(layout(), precision="fp64")
ORACLE = run_oracle(PLAN, 3)
NAME, OTHER = "layers.0.mlp.up.weight", "layers.1.mlp.up.weight"


def replayed(name: str, seen: torch.Tensor, *, rows: slice = slice(None)) -> ReplayedUpdate:
    """Return the third update of `name`, of which `seen` took place in some rows."""
    where = torch.zeros(seen.shape, dtype=torch.bool)
    where[rows] = True
    return ReplayedUpdate(
        spec=replicas(PLAN).run.specs[name],
        optimizer=PLAN.mathematics.optimizer,
        steps=ORACLE,
        where=where,
        seen=seen[where],
    )


def state_after(name: str, steps: tuple[OracleStep, ...]) -> OptimizerState:
    """Return the running sums of a tensor after some updates."""
    one, state = replayed(name, ORACLE[0].before[name]), OptimizerState()
    for step in steps:
        one.update(step, one.optimizer, state)
    return state


def made_from(sums: dict[str, torch.Tensor], value: torch.Tensor) -> torch.Tensor:
    """Return what the third update adds to `NAME`, made from other sums and another value."""
    one, state = replayed(NAME, value), OptimizerState(sums=dict(sums), num_updates=2)
    update = one.update(ORACLE[2], one.optimizer, state, value)
    return value + update.total - ORACLE[2].before[NAME]


OWN, OLD = state_after(NAME, ORACLE[:2]).sums, state_after(NAME, ORACLE[:1]).sums
OF_OTHER = state_after(OTHER, ORACLE[:2]).sums
NOW = ORACLE[2].before[NAME]

CASES = {
    "sums": (made_from(OLD, NOW), "first moment and second moment as of 1 update before"),
    "second": (
        made_from({**OWN, "exp_avg_sq": OLD["exp_avg_sq"]}, NOW),
        "made from the second moment as of 1 update before",
    ),
    "forgotten": (made_from({}, NOW), "second moment as of 2 updates before (zero)"),
    "all": (
        made_from(OLD, ORACLE[1].before[NAME]),
        "first moment, second moment and value as of 1 update before",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_an_older_state_is_told_with_its_age(case: str) -> None:
    seen, says = CASES[case]
    (found,) = explain_state(replayed(NAME, seen), [])
    assert found.factor == "stale"
    assert says in found.description


def test_the_state_of_another_tensor_is_told_with_its_name() -> None:
    for sums, says in (
        (OF_OTHER, f"made from the first moment and second moment of {OTHER}"),
        (state_after(OTHER, ORACLE).sums, f"of {OTHER}, as of after this step"),
    ):
        seen = made_from(sums, NOW)
        (found,) = explain_state(replayed(NAME, seen), [replayed(OTHER, seen)])
        assert found.factor == "another's state"
        assert says in found.description
        assert not list(explain_state(replayed(NAME, seen), []))


def test_another_function_of_the_right_state_is_none_of_it() -> None:
    right = ORACLE[2].updates[NAME].total
    for seen in (right.flip(0), 1.5 * right, right + 0.01 * NOW, right.roll(1, 1)):
        assert not list(explain_state(replayed(NAME, seen), [replayed(OTHER, seen)]))


def told(seen: torch.Tensor) -> ProofFinding:
    """Return what is said of a third update, of one rank, that was `seen`."""

    def shard(piece: ObservedShard) -> torch.Tensor:
        this = (piece.kind, piece.step, piece.name) == ("parameters", 2, NAME)
        return ORACLE[2].before[NAME] + seen if this else piece.tensor

    return explain_update(replicas(PLAN, 3, shard=shard), Check(2, NAME, 1.0))


def test_some_rows_of_an_older_state_are_told_with_their_numbers() -> None:
    seen = ORACLE[2].updates[NAME].total.clone()
    seen[-3:] = CASES["all"][0][-3:]
    found = told(seen)
    rows = len(seen)
    assert found.factor == "stale"
    assert found.description.startswith(f"in elements {rows - 3}:{rows} of dim 0 only: made from")

    seen[-3:] = seen[-3:].flip(1)
    assert told(seen).factor == "slice", "another function, of these rows"


def test_the_scale_of_a_tensor_slice_is_told_where_it_differs() -> None:
    plan = layout(tp=2, optimizer={"kind": "muon"}, model={"ffn": 352})
    spec = next(one for one in parameters(plan.model) if one.name == NAME)
    one = replayed(NAME, NOW)
    muon = replace(one, spec=spec, optimizer=plan.mathematics.optimizer)
    longer, local = max(spec.shape), max(spec.local_shape(2))
    assert local < longer, "the split shortens the longer side"
    found = explain_muon_scale(muon, plan, (local / longer) ** 0.5)
    assert found is not None
    assert (found.factor, found.axis) == ("local scale", "tp")
    assert explain_muon_scale(muon, plan, 0.9) is None
    assert explain_muon_scale(one, plan, (local / longer) ** 0.5) is None, "AdamW has no such scale"
