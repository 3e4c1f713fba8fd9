"""What changes numbers becomes tables of DeepSpeed."""

from __future__ import annotations

from echelon.interop.deepspeed.write import WRITER
from tests.interop.plans import FP16, job_of


def keys(*settings: str) -> dict[str, object]:
    return dict(WRITER.keys(job_of(settings).plan, {}))


def test_dtypes_and_the_loss_scale() -> None:
    found = keys("precision.parameters=bf16")
    assert found["bf16.enabled"] is True
    assert found["data_types.grad_accum_dtype"] == found["communication_data_type"] == "fp32"
    scaled = keys(*FP16, "precision.loss_scaling=dynamic", "precision.loss_scale=1024")
    assert (scaled["fp16.loss_scale"], scaled["fp16.initial_scale_power"]) == (0, 10)


def test_optimizer_and_scheduler_have_their_names_there() -> None:
    found = keys("optimizer.kind=sgd", "optimizer.schedule=constant")
    assert (found["optimizer.type"], found["scheduler.type"]) == ("SGD", "WarmupLR")
    assert "optimizer.params.betas" not in found
    assert "scheduler.type" not in keys("optimizer.schedule=wsd", "optimizer.decay_steps=9")
