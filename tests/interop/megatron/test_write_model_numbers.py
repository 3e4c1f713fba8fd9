"""What changes numbers becomes flags of Megatron-LM."""

from __future__ import annotations

from echelon.interop.megatron.write import number_flags
from tests.interop.plans import ALL_BF16, FP16, job_of


def flags(*settings: str) -> dict[str, object]:
    return number_flags(job_of(settings).plan)


def test_dtypes() -> None:
    assert flags(*ALL_BF16)["--grad-reduce-in-bf16"] is True
    found = flags("precision.parameters=bf16")
    assert found["--accumulate-allreduce-grads-in-fp32"] is True
    scaled = flags(*FP16, "precision.loss_scaling=dynamic", "precision.loss_scale_hysteresis=3")
    assert scaled["--hysteresis"] == 3


def test_optimizers_have_their_names_there() -> None:
    assert flags()["--optimizer"] == "adam"
    found = flags("optimizer.kind=muon")
    assert (found["--optimizer"], found["--muon-scale-mode"]) == ("muon", "spectral")


def test_the_learning_rate_falls_to_its_ratio() -> None:
    found = flags("optimizer.final_ratio=0.5", "optimizer.learning_rate=0.001")
    assert found["--min-lr"] == 0.0005
