"""A module under a plan is proven, and mistakes in its split are not."""

from __future__ import annotations

from pathlib import Path

import pytest

import echelon as ec
from echelon.api.modules.proving import prove_module
from echelon.core.errors import ProofFailed
from tests.api.modules.files import LOST_SUM, OWN, SWAPPED, UNSUMMED, WRONG_FACTOR, written

TP = ("mesh.tp=2", "mesh.sequence_parallel=false")
SEQUENCE = ("mesh.tp=2", "mesh.sequence_parallel=true")


@pytest.mark.slow
@pytest.mark.parametrize("settings", [TP, SEQUENCE, (*SEQUENCE, "mesh.dp_shard=2", "zero.stage=3")])
def test_a_module_is_proven(tmp_path: Path, settings: tuple[str, ...]) -> None:
    proof = prove_module(written(tmp_path, OWN), ec.plan("nano", settings=[*settings]))
    proof.require()
    assert proof.framework == "Echelon"
    assert [one.precision for one in proof.passes] == ["fp64", "fp32"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "settings", "rule", "told"),
    [
        (SWAPPED, TP, "prove-loss", "loss"),
        (LOST_SUM, TP, "prove-loss", "loss"),
        (WRONG_FACTOR, TP, "prove-gradients", "1/tp = 1/2"),
        (UNSUMMED, SEQUENCE, "prove-gradients", "not reduced over tp"),
    ],
)
def test_a_mistake_is_named(
    tmp_path: Path, text: str, settings: tuple[str, ...], rule: str, told: str
) -> None:
    proof = prove_module(written(tmp_path, text), ec.plan("nano", settings=[*settings]))
    assert not proof.proven
    with pytest.raises(ProofFailed) as caught:
        proof.require()
    assert rule in caught.value.rules
    assert told in str(caught.value)
