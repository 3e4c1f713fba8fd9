"""Optimizer and recompute: each takes the settings that it uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.config.load import load_job
from echelon.core.plan import Optimizer, Recompute
from tests.config.problems import SMALL, problems_of, write


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write(tmp_path, SMALL)


def test_rotary_scaling_of_learned_positions_has_no_effect() -> None:
    found = problems_of("llama3.1-405b", ["model.positions=learned", "model.rope_theta=10000"])
    assert list(found) == ["no-effect"]
    assert "[model.rope_scaling] changes nothing" in found["no-effect"].message


def test_calls_are_compared_before_the_step_timeout_ends_the_run(small: Path) -> None:
    found = problems_of(small, ["train.step_timeout_s=60", "train.desync_after_s=90"])
    assert list(found) == ["no-effect"]
    assert found["no-effect"].key == "train.desync_after_s"
    assert "train.step_timeout_s = 60 ends the run before" in found["no-effect"].message
    assert "train.desync_after_s = 10.0" in found["no-effect"].suggestions
    assert load_job(small, ["train.step_timeout_s=5"]).train.desync_after_s == 10.0
    assert load_job(small, ["train.desync_after_s=0"]).train.desync_after_s == 0.0


def test_selective_recompute_is_of_operators(small: Path) -> None:
    recompute = load_job(small, ["recompute.policy=selective"]).plan.layout.recompute
    assert recompute.operators == ("norm", "activation")
    sets = ["recompute.policy=full", "recompute.every=2", 'recompute.operators=["norm", "mlp"]']
    recompute = load_job(small, sets).plan.layout.recompute
    assert recompute.operators_of(1) == {"norm", "mlp"}
    assert recompute.operators_of(2) == frozenset()
    assert recompute.redoes("attention", 2)
    assert not recompute.redoes("attention", 1)
    assert load_job(small, []).plan.layout.recompute.operators == ()
    assert load_job("mixtral-8x7b", ["recompute.policy=selective"]).plan.layout.recompute == (
        Recompute(policy="selective", operators=("norm",))
    )


@pytest.mark.parametrize(
    ("source", "policy", "operators", "mended"),
    [
        ("", "none", '["norm"]', 'recompute.policy = "selective"'),
        ("", "full", '["norm"]', "recompute.every = 2"),
        ("", "selective", "[]", 'recompute.operators = "auto"'),
        ("", "selective", '["activation", "mlp"]', 'recompute.operators = ["mlp"]'),
        ("mixtral-8x7b", "selective", '["mlp", "norm"]', 'recompute.operators = ["norm"]'),
        ("deepseek-v3", "selective", '["attention"]', 'recompute.operators = "auto"'),
    ],
)
def test_operators_that_change_nothing_are_refused(
    small: Path, source: str, policy: str, operators: str, mended: str
) -> None:
    sets = [f"recompute.policy={policy}", f"recompute.operators={operators}"]
    found = problems_of(source or small, sets)
    assert list(found) == ["no-effect"]
    assert found["no-effect"].key == "recompute.operators"
    assert mended in found["no-effect"].suggestions


def test_an_operator_that_is_none_is_refused(small: Path) -> None:
    sets = ["recompute.policy=selective", 'recompute.operators=["norm", "softmax"]']
    found = problems_of(small, sets)["unknown-choice"]
    assert '"softmax"' in found.message
    assert found.suggestions == ('["norm"]',)


def test_each_optimizer_takes_what_it_uses(small: Path) -> None:
    momentum = ["optimizer.momentum=0.9"]
    moments = ["optimizer.beta1=0.8", "optimizer.beta2=0.9", "optimizer.eps=1e-6"]
    steps = ["optimizer.newton_schulz_steps=6", "optimizer.decay=blocks"]
    for kind, sets in (
        ("adamw", moments),
        ("sgd", momentum),
        ("muon", [*momentum, *moments, *steps]),
    ):
        optimizer = load_job(small, [f"optimizer.kind={kind}", *sets]).plan.mathematics.optimizer
        assert optimizer.kind == kind
        changed = {text.removeprefix("optimizer.").partition("=")[0] for text in sets}
        default = Optimizer()
        assert all(getattr(optimizer, name) != getattr(default, name) for name in changed)


def test_stored_inputs_of_recomputed_blocks_may_wait_on_the_host(small: Path) -> None:
    job = load_job(small, ["recompute.policy=full", "recompute.offload=host"])
    assert job.plan.layout.recompute.offload == "host"


def test_settings_of_trackers_need_a_tracker_that_reads_them(small: Path) -> None:
    assert load_job(small).observe.trackers == ()
    found = problems_of(small, ["observe.tracker_project=mine"])
    assert list(found) == ["no-effect"]
    assert "no tracker mirrors the run" in found["no-effect"].message
    found = problems_of(small, ["observe.tracker_drain_s=5"])
    assert found["no-effect"].key == "observe.tracker_drain_s"
    only = 'observe.trackers=["tensorboard"]'
    found = problems_of(small, [only, "observe.tracker_project=mine"])
    assert "TensorBoard has no projects" in found["no-effect"].message
    both = 'observe.trackers=["tensorboard", "mlflow"]'
    job = load_job(small, [both, "observe.tracker_project=mine", "observe.tracker_drain_s=5"])
    assert job.observe.trackers == ("tensorboard", "mlflow")
    assert (job.observe.tracker_project, job.observe.tracker_drain_s) == ("mine", 5)
    found = problems_of(small, ['observe.trackers=["tensorbord"]'])
    assert list(found) == ["unknown-choice"]


def test_norms_whose_files_keep_less_do_not_decay(small: Path) -> None:
    gemma = ["model.norm_offset=1.0", "optimizer.decay=all"]
    found = problems_of(small, gemma)
    assert list(found) == ["decay-fits-norm-offset"]
    assert "to 0, and in transformers to 1: its files keep 1 less" in (
        found["decay-fits-norm-offset"].message
    )
    assert 'optimizer.decay = "matrices"' in found["decay-fits-norm-offset"].suggestions
    assert load_job(small, gemma[:1]).plan.mathematics.optimizer.decay == "matrices"
    assert load_job(small, gemma[1:]).plan.mathematics.optimizer.decay == "all"
