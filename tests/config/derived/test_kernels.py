"""What "auto" means for kernels, and that a plan keeps it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from echelon.config.load import load_job
from echelon.core.choices.kernels import Kernels
from echelon.core.plan import Plan
from tests.config.problems import SMALL, write

EVERY = ("norm", "residual", "rotary", "swiglu", "loss", "update")


def test_on_gpus_every_piece_of_the_model_is_a_kernel_in_triton() -> None:
    job = load_job("llama3-8b-zero3")
    assert job.plan.layout.kernels == Kernels(provider="triton", fused=EVERY)
    told = {row.key: (row.value, row.source) for row in job.sources}
    assert told["kernels.provider"] == ('"triton"', "derived: the devices are GPUs")
    assert told["kernels.fused"][1] == "derived: the pieces that the run has"


def test_on_processors_every_piece_is_plain(tmp_path: Path) -> None:
    small = write(tmp_path, SMALL)
    kernels = load_job(small).plan.layout.kernels
    assert kernels == Kernels()
    assert {kernels.of(piece) for piece in EVERY} == {"plain"}
    compiled = load_job(small, ["kernels.provider=compiled"]).plan.layout.kernels
    assert compiled == Kernels(provider="compiled", fused=EVERY[:-1])


def test_some_pieces_may_be_named() -> None:
    job = load_job("llama3-8b-zero3", ['kernels.fused=["norm", "swiglu"]'])
    kernels = job.plan.layout.kernels
    assert (kernels.of("norm"), kernels.of("residual")) == ("triton", "plain")
    plain = load_job("llama3-8b-zero3", ["kernels.provider=plain"]).plan
    assert plain.layout.kernels == Kernels()
    assert plain.same_mathematics(job.plan)


def test_a_plan_keeps_its_kernels_as_json() -> None:
    plan = load_job("llama3-8b-zero3", ['kernels.fused=["norm"]']).plan
    assert Plan.from_json(plan.to_json()) == plan
    other = replace(plan, layout=replace(plan.layout, kernels=Kernels()))
    assert other.content_hash() != plan.content_hash()
