"""What was asked to be sharded beside what ranks hold: on made-up ranks, and programs of torch."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from echelon.core.rulebook.verify import VERIFY_SHARDING
from echelon.proof.causes.diagnose import not_sharded
from echelon.proof.claims.captured_checks import sharding
from echelon.proof.claims.checks import Check
from echelon.proof.evidence.captured import AskedSharding, HeldCopies, LogicalParameters
from echelon.proof.evidence.evidence import CapturedEvidence
from echelon.proof.evidence.mesh import NamedMesh
from echelon.proof.verify.capture import asked_sharding
from echelon.proof.verify.case import OnRank
from echelon.proof.verify.placement.names import NameTable
from echelon.proof.verify.placement.program import open_program

LOGICAL = LogicalParameters(shapes={"weight": (4, 2), "scale": (1,)}, aliases={})
FSDP = AskedSharding(stage=3, by="FSDP")
MESH = NamedMesh({"dp": 2, "tp": 2})


def problems(asked: AskedSharding, *ranks: int, num_holders: int = 2) -> dict[str, str]:
    """Return what is wrong with tensors of 32 bytes that `ranks` hold the same of."""
    held = {name: HeldCopies(ranks[0], 32, ranks, num_holders) for name in LOGICAL.shapes}
    return {one.subject: one.detail for one in sharding(evidence_of(asked, held))}


def evidence_of(asked: AskedSharding, held: dict[str, HeldCopies]) -> CapturedEvidence:
    """Return evidence of ranks of which only this is known."""
    run = SimpleNamespace(shapes=LOGICAL.shapes, asked=asked, held_copies=lambda: held)
    groups = [("dp", ((0, 2), (1, 3))), ("tp", ((0, 1), (2, 3)))]
    evidence = SimpleNamespace(run=run, mesh=MESH, sums=lambda _: groups)
    return cast("CapturedEvidence", evidence)


def test_copies_are_no_shards() -> None:
    said = problems(FSDP, 0, 2)["weight"]
    assert said == (
        "rank 0 holds 32 bytes of it, and so does rank 2: FSDP asks for shards of 16 bytes"
    )
    finding = not_sharded(
        evidence_of(FSDP, {"weight": HeldCopies(0, 32, (0, 2), 4)}),
        Check(-1, "weight", 1.0, detail=said),
    )
    assert (finding.factor, finding.axis, finding.value) == ("not sharded", "dp", 2.0)
    assert VERIFY_SHARDING.id == "verify-sharding"


def test_shards_hold_and_so_do_hybrid_ones() -> None:
    assert problems(FSDP, 0) == {"weight": ""}
    hybrid = AskedSharding(stage=3, by="FSDP", wrapped=True)
    assert problems(hybrid, 0, 2, num_holders=4) == {"weight": ""}
    assert problems(hybrid, 0, 1)["weight"]


def test_an_engine_says_what_it_keeps() -> None:
    asked = AskedSharding(stage=3, by="ZeRO 3", held={"weight": (16, 32)})
    assert problems(asked, 0, 1) == {"weight": ""}
    whole = AskedSharding(stage=3, by="ZeRO 3", held={"weight": (32, 32)})
    assert problems(whole, 0, 1) == {
        "weight": "each rank keeps 32 of 32 bytes; ZeRO 3 asks for shards"
    }


def test_lower_stages_share_moments() -> None:
    assert FSDP.kind == "parameters"
    assert AskedSharding(stage=1, by="ZeRO 1").kind == "exp_avg"


def asked_of(monkeypatch: pytest.MonkeyPatch, engine: Any = None) -> AskedSharding | None:
    """Return what a program of a plain linear layer asks for."""
    logical = LogicalParameters(shapes={"weight": (4, 2)}, aliases={})
    model = nn.Linear(2, 4, bias=False)
    if engine is not None:
        parameter = cast("Any", model.weight)
        parameter.ds_tensor, parameter.ds_shape = torch.zeros(4), model.weight.shape
        parameter.ds_numel = 8
    table = NameTable(logical=logical, mesh=MESH, rank=0, names={})
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    return asked_sharding(open_program(OnRank(model=model, engine=engine), table))


def test_accelerate_is_asked_where_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "accelerate", raising=False)
    assert asked_of(monkeypatch) is None
    monkeypatch.setitem(sys.modules, "accelerate", cast("Any", SimpleNamespace()))
    assert asked_of(monkeypatch) == AskedSharding(stage=3, by="FSDP (ACCELERATE_USE_FSDP)")


@pytest.mark.parametrize(("stage", "held"), [(3, {"weight": (16, 32)}), (2, None)])
def test_an_engine_of_deepspeed_has_a_stage(
    stage: int, held: dict[str, tuple[int, int]] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = SimpleNamespace(zero_optimization_stage=lambda: stage)
    asked = asked_of(monkeypatch, engine)
    assert (asked and asked.held) == held
