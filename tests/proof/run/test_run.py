"""A proof from end to end, of an engine that is not Echelon's: whole, and broken in every way."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from echelon.core.errors import ConfigError, ProofFailed
from echelon.core.plan import Precision
from echelon.launch.local.supervisor import RankPool
from echelon.proof.causes.finding import Diagnosis
from echelon.proof.run import prove
from echelon.proof.verdict import Proof
from tests.proof.layouts import layout

FP64 = Precision(parameters="fp64", gradients="fp64", reduction="fp64", master="fp64")
MICROBATCH = "loss of dp 0 microbatch 0"


def no_ranks(target: str, argument: object, world_size: int, /, **_: object) -> None:
    """Fail: nothing may be started."""
    raise AssertionError("a rank was started")


def prove_toy(pool: RankPool, name: str, *, own_precision: bool = False) -> Proof:
    """Return the proof of one of the engines in `toy.py` on two ranks."""
    return prove(
        layout(dp=2),
        run_ranks=pool.run,
        subject=f"tests.proof.toy:{name}",
        own_precision=own_precision,
    )


def diagnosis_of(pool: RankPool, name: str) -> Diagnosis:
    """Return what the prover says of a broken toy in float64."""
    found = prove_toy(pool, name).diagnosis
    assert found is not None
    return found


def test_an_engine_of_another_make_is_proven(rank_pool: RankPool) -> None:
    proof = prove_toy(rank_pool, "Toy", own_precision=True)

    assert proof.proven
    assert proof.diagnosis is None
    assert [one.precision for one in proof.passes] == ["fp64", "fp32"]
    assert all(claim.compared > 0 for one in proof.passes for claim in one.claims)
    proof.require()


def test_one_process_alone_is_proven(rank_pool: RankPool) -> None:
    plan = layout()
    assert prove(plan, run_ranks=rank_pool.run, subject="tests.proof.toy:Toy").proven


def test_a_float64_plan_is_proven_once(rank_pool: RankPool) -> None:
    plan = layout()
    exact = replace(plan, mathematics=replace(plan.mathematics, precision=FP64))
    proof = prove(exact, run_ranks=rank_pool.run, subject="tests.proof.toy:Toy")
    assert [one.precision for one in proof.passes] == ["fp64"]


def test_the_written_proof_says_all(rank_pool: RankPool, tmp_path: Path) -> None:
    proof = prove_toy(rank_pool, "NotFinite")
    proof.write(tmp_path / "proof.json")

    # `parse_constant` is called for NaN and infinities, which are not JSON.
    def refuse(constant: str) -> float:
        raise AssertionError(constant)

    text = (tmp_path / "proof.json").read_text(encoding="utf-8")
    written = json.loads(text, parse_constant=refuse)
    assert written["proven"] is False
    assert written["plan_hash"] == layout(dp=2).content_hash()
    assert written["passes"][0]["diagnosis"]["tensor"] == "norm.weight"
    claims = {claim["rule"]: claim for claim in written["passes"][0]["claims"]}
    assert claims["prove-gradients"]["max_error"] == "nan"
    assert claims["prove-initial-weights"]["holds"] is True


@pytest.mark.quick(
    "NotFinite-prove-gradients-norm.weight-not finite",
    "Forgetful-prove-clipped-update-embedding.weight-none",
)
@pytest.mark.parametrize(
    ("name", "rule", "tensor", "factor"),
    [
        ("NobodyAnswers", "prove-nothing-dropped", "norm.weight", "one shard missing"),
        ("EveryoneAnswers", "prove-nothing-dropped", "embedding.weight", "doubled"),
        ("HalfIsMissing", "prove-nothing-dropped", "embedding.weight", "one shard missing"),
        ("TooLarge", "prove-nothing-dropped", "embedding.weight", "one shard missing"),
        ("RoundingTo32", "prove-gradients", "head.weight", "reordering only"),
        ("LossIn32", "prove-loss", "loss", "reordering only"),
        ("MicrobatchLossIn32", "prove-microbatch-loss", MICROBATCH, "reordering only"),
        ("Miscounted", "prove-microbatch-loss", MICROBATCH, "token count"),
        ("NormIn32", "prove-gradient-norm", "gradient norm", "reordering only"),
        ("UpdateRounded", "prove-clipped-update", "norm.weight", "reordering only"),
        ("NotFinite", "prove-gradients", "norm.weight", "not finite"),
        ("Silent", "prove-gradients", "norm.weight", "zero"),
        ("Drifting", "prove-replicas", "norm.weight", "copies differ"),
        ("ClippedByTorch", "prove-clipped-update", "embedding.weight", "clip epsilon"),
        ("NotClipped", "prove-clipped-update", "embedding.weight", "clip"),
        ("Forgetful", "prove-clipped-update", "embedding.weight", "none"),
    ],
)
def test_a_broken_toy_is_caught(
    rank_pool: RankPool, name: str, rule: str, tensor: str, factor: str
) -> None:
    found = diagnosis_of(rank_pool, name)
    assert (found.rule, found.tensor, found.factor) == (rule, tensor, factor), found.sentence()


def test_a_mistake_on_one_rank_names_its_axis(rank_pool: RankPool) -> None:
    found = diagnosis_of(rank_pool, "Silent")
    assert (found.axis, found.ranks) == ("dp", (1,))
    assert found.says == "only on dp [1]: zero"


def test_what_follows_from_a_mistake_is_told_too(rank_pool: RankPool) -> None:
    with pytest.raises(ProofFailed) as failed:
        prove_toy(rank_pool, "Forgetful").require()
    assert "prove-parameters" in failed.value.rules
    assert "prove-initial-weights" not in failed.value.rules
    assert failed.value.exit_code == 1


def test_a_coarse_reduction_shows_in_the_precision_of_the_run_only(rank_pool: RankPool) -> None:
    proof = prove_toy(rank_pool, "RoundingBelow64", own_precision=True)

    exact, own = proof.passes
    assert exact.holds
    assert not own.holds
    assert own.diagnosis is not None
    assert (own.diagnosis.rule, own.diagnosis.factor) == ("prove-gradients", "reordering only")


@pytest.mark.parametrize("subject", ["nowhere:build", "tests.proof.toy:nothing", "no colon", ":x"])
def test_a_subject_that_cannot_be_had_is_refused_before_any_rank(subject: str) -> None:
    with pytest.raises(ConfigError) as refused:
        prove(layout(), run_ranks=no_ranks, subject=subject)
    assert refused.value.rules == ("prove-subject",)


def test_a_subject_must_be_a_function() -> None:
    with pytest.raises(ConfigError) as refused:
        prove(layout(), run_ranks=no_ranks, subject="tests.proof.toy:NOT_A_FUNCTION")
    assert refused.value.rules == ("prove-subject",)
