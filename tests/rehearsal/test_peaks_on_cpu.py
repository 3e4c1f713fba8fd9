"""The peak of a plan of one CPU rank is what its storages take there, in products of 8 bits too.

A rehearsal is of GPUs. On a CPU, where 8-bit numbers are widened to be multiplied, the same engine
runs here, and every storage that an operator makes is counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from echelon.config.load import load_job
from echelon.core.event import NoEvents
from echelon.core.plan import Plan
from echelon.cost.activations.linear import Fp8Products
from echelon.cost.peak.rank_peak import PeakWalk, with_few_microbatches
from echelon.models.batch import TokenBatch
from echelon.parallel.transport.recorder import Recorder
from echelon.rehearsal.memory import MemoryMeter
from echelon.training.engine import TrainEngine

CPU = torch.device("cpu")
WIDTHS = (
    *("precision.matmul=fp8", "model.hidden=256", "model.ffn=512", "model.layers=2"),
    *("model.heads=4", "model.kv_heads=2", "model.head_dim=64", "batch.global_sequences=4"),
)
BF16 = ("precision.parameters=bf16", *WIDTHS)
WHOLE = "precision.fp8_scales=tensor"
EXPERTS = ("model.experts.num_experts=4", "model.experts.top_k=2", "model.experts.ffn=128")

CASES: dict[str, tuple[str, ...]] = {
    "squares of 128": BF16,
    "squares of 32": (*BF16, "precision.fp8_block=32"),
    "sgd": (*BF16, "optimizer.kind=sgd", "optimizer.momentum=0.0"),
    "whole tensors": (*BF16, WHOLE),
    "fp32": WIDTHS,
    "fp32, whole tensors": (*WIDTHS, WHOLE),
    "e5m2, whole tensors": (*BF16, WHOLE, "precision.fp8_gradients=e5m2"),
    "no gate": (*BF16, "model.gated=false", "model.norm=layernorm"),
    "recomputed": (*BF16, "recompute.policy=full"),
    "sums in bf16": (*BF16, "precision.gradients=bf16"),
    "all in bf16": (*BF16, "precision.gradients=bf16", "precision.master=bf16"),
    "experts": (*BF16, *EXPERTS),
    "experts, whole tensors": (*BF16, *EXPERTS, WHOLE),
    "shared experts": (*BF16, *EXPERTS, "model.experts.shared_experts=1"),
}


class _Storages(TorchDispatchMode):
    """Count every storage that an operator makes, from its making to its end."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = MemoryMeter()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.memory.made(tensor)
        return out


def _measured(plan: Plan) -> int:
    """Return the most bytes in a step: the first one, or the next, which has a history."""
    rows, length = plan.layout.microbatch_sequences, plan.mathematics.sequence_length
    tokens_BT = torch.zeros((rows, length), dtype=torch.int64)
    peaks: list[int] = []
    with _Storages() as storages:
        engine = TrainEngine(plan, Recorder(0, NoEvents()), CPU)
        for step in range(2):
            batches = [
                TokenBatch.from_rows(
                    tokens_BT.clone(), tokens_BT.clone(), torch.arange(rows), step=step, seed=1
                )
                for _ in range(plan.num_microbatches)
            ]
            storages.memory.forget_peak()
            engine.step(batches, step)
            peaks.append(storages.memory.peak_bytes)
        engine.close()
    return max(peaks)


def _off(plan: Plan, measured: int) -> float:
    """Return how far the plan is from what was measured, as a share of that."""
    return PeakWalk(plan).peak(0).bytes / measured - 1.0


def _planned(name: str) -> Plan:
    return with_few_microbatches(load_job("nano", CASES[name]).plan)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", CASES)
def test_the_peak_of_a_cpu_rank_is_met_in_8_bits(name: str) -> None:
    plan = _planned(name)
    assert plan.cluster.backend == "gloo"
    assert abs(_off(plan, _measured(plan))) <= 0.02


def test_what_products_widen_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = _planned("sgd")
    measured = _measured(plan)
    assert abs(_off(plan, measured)) <= 0.01
    monkeypatch.setattr(Fp8Products, "bytes", lambda *_, **__: 0)
    assert _off(plan, measured) < -0.02
