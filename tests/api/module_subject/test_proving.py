"""A module under a plan is proven, and mistakes in its split are not."""

from __future__ import annotations

from pathlib import Path

import pytest

import echelon as ec
from echelon.api.verifying import prove_module
from echelon.core.errors import ConfigError, ProofFailed
from tests.api.module_subject.files import (
    LOST_MICROBATCH,
    LOST_SUM,
    MIXTRAL,
    MOE,
    OWN,
    SHIFTED_LABEL,
    STAGED,
    SWAPPED,
    UNSUMMED,
    UNSUMMED_GATES,
    WRONG_FACTOR,
    WRONG_NAME,
    WRONG_ROUTER,
    written,
)

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
@pytest.mark.parametrize("settings", [TP, SEQUENCE, (*SEQUENCE, "mesh.dp_shard=2", "zero.stage=3")])
def test_experts_are_proven(tmp_path: Path, settings: tuple[str, ...]) -> None:
    prove_module(written(tmp_path, MOE), ec.plan("nano", settings=[*settings])).require()


@pytest.mark.slow
@pytest.mark.parametrize("settings", [TP, SEQUENCE])
def test_experts_of_transformers_are_proven(tmp_path: Path, settings: tuple[str, ...]) -> None:
    prove_module(written(tmp_path, MIXTRAL), ec.plan("nano", settings=[*settings])).require()


@pytest.mark.slow
def test_a_rule_that_names_no_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        prove_module(written(tmp_path, WRONG_NAME), ec.plan("nano", settings=[*TP]))
    assert caught.value.rules == ("module-tensor-rules",)
    assert "model.layers.*.mlp.experts" in str(caught.value)


PP = ("mesh.pp=2", "model.layers=2", "batch.microbatch_sequences=1", "batch.sequence_length=8")
CP = ("mesh.cp=2", "model.layers=2", "batch.microbatch_sequences=1", "batch.sequence_length=8")


def sized(settings: tuple[str, ...], data_ranks: int = 1) -> list[str]:
    """Return settings with as many sequences as the batches of a file have."""
    return [*settings, f"batch.global_sequences={2 * data_ranks}"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "data_ranks"),
    [
        (PP, 1),
        (("pipeline.schedule=zb-h1", "mesh.tp=2", "mesh.sequence_parallel=true", *PP), 1),
        (("zero.stage=3", "mesh.dp_shard=2", "mesh.tp=2", *PP), 2),
        (CP, 1),
        (("mesh.tp=2", "zero.stage=1", "mesh.dp_shard=2", *CP), 2),
        (("mesh.pp=2", *CP), 1),
        (("mesh.tp=2", "model.layers=2", "batch.microbatch_sequences=1"), 1),
        (("mesh.dp_shard=2", "zero.stage=2", *PP), 2),
        (("mesh.dp_shard=2", "zero.stage=2", "zero.accumulate=slices", *PP), 2),
        (("zero.stage=2", *CP), 1),
        (("mesh.dp_shard=2", "zero.stage=2", "zero.accumulate=slices", *CP), 2),
    ],
)
def test_stages_and_context_ranks_are_proven(
    tmp_path: Path, settings: tuple[str, ...], data_ranks: int
) -> None:
    plan = ec.plan("nano", settings=sized(settings, data_ranks))
    prove_module(written(tmp_path, STAGED), plan).require()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "settings", "rule", "told"),
    [
        (LOST_MICROBATCH, PP, "prove-gradients", "blocks.0"),
        (SHIFTED_LABEL, CP, "prove-loss", "loss"),
    ],
)
def test_a_mistake_of_stages_or_context_ranks_is_named(
    tmp_path: Path, text: str, settings: tuple[str, ...], rule: str, told: str
) -> None:
    proof = prove_module(written(tmp_path, text), ec.plan("nano", settings=sized(settings)))
    assert not proof.proven
    with pytest.raises(ProofFailed) as caught:
        proof.require()
    assert rule in caught.value.rules
    assert told in str(caught.value)


@pytest.mark.slow
def test_a_loss_of_one_data_rank_is_none_of_stages(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        prove_module(written(tmp_path, OWN), ec.plan("nano", settings=sized(PP)))
    assert caught.value.rules == ("verify-returned",)
    assert "mesh.pp = 2 takes global batches" in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "settings", "rule", "told"),
    [
        (SWAPPED, TP, "prove-loss", "loss"),
        (LOST_SUM, TP, "prove-loss", "loss"),
        (WRONG_FACTOR, TP, "prove-gradients", "1/tp = 1/2"),
        (UNSUMMED, SEQUENCE, "prove-gradients", "not reduced over tp"),
        (UNSUMMED_GATES, TP, "prove-gradients", "router"),
        (WRONG_ROUTER, TP, "prove-gradients", "mlp.gate.weight (copies over tp): 2 times"),
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
