"""Where a NaN came from: the first module, microbatch and samples that were not finite.

Every rank takes part, in step, after a step whose loss or norm was not finite and before any
weight has changed. The forward pass is run again with a look at what each module gives; where all
of it is finite, the gradients are looked at instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from echelon.core.errors import RunFailed
from echelon.core.rulebook.train import LOSS_NOT_FINITE
from echelon.models.batch import TokenBatch
from echelon.train.engine import StepResult, TrainEngine, forward_only

_TEXT_BYTES = 256
_NOTHING = 1 << 30
_MODULES_PER_STAGE = 1 << 20


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class Finding:
    """Say what a rank saw first; findings sort by when a forward pass would meet them."""

    microbatch: int
    position: int
    rank: int
    text: str


def explain_not_finite(
    engine: TrainEngine, batches: Sequence[TokenBatch], step: int, result: StepResult
) -> RunFailed:
    """Return the error that names where the first value that is not finite came from."""
    finding = _first(engine, _in_forward(engine, batches) or _in_gradients(engine))
    where = "" if finding is None else f"; first seen on {finding.text}"
    values = f"loss {result.loss}, gradient norm {result.grad_norm}"
    return RunFailed(
        LOSS_NOT_FINITE.problem(
            f"step {step}: {values}{where}; the weights are those of step {step - 1}",
            works=("a lower optimizer.learning_rate", "more optimizer.warmup_steps"),
        )
    )


@torch.no_grad()
def _in_forward(engine: TrainEngine, batches: Sequence[TokenBatch]) -> Finding | None:
    found: list[Finding] = []
    recorder = engine.groups.recorder
    order = {name: i for i, (name, _) in enumerate(engine.model.stage.named_modules())}

    def watch(name: str, module: nn.Module) -> torch.utils.hooks.RemovableHandle:
        def look(_module: nn.Module, _inputs: object, output: object) -> None:
            if found or not isinstance(output, torch.Tensor) or output.isfinite().all():
                return
            microbatch = recorder.microbatch or 0
            samples = [int(i) for i in batches[microbatch].sample_ids_B]
            found.append(
                Finding(
                    microbatch=microbatch,
                    position=(recorder.stage or 0) * _MODULES_PER_STAGE + order[name],
                    rank=engine.groups.rank,
                    text=f"{_who(engine)}, microbatch {microbatch} (samples {_some(samples)}), "
                    f"in {name or 'the loss'}",
                )
            )

        return module.register_forward_hook(look)

    handles = [watch(name, module) for name, module in engine.model.stage.named_modules()]
    try:
        schedule = forward_only(engine.schedule, len(batches))
        engine.model.executor.run(schedule, batches, 1.0)
    finally:
        for handle in handles:
            handle.remove()
    return _first(engine, found[0] if found else None)


def _in_gradients(engine: TrainEngine) -> Finding | None:
    position = 0
    for bucket in engine.model.buckets:
        for slot in bucket.slots:
            position += 1
            part = bucket.within_own(slice(slot.start, slot.end))
            if not bucket.gradient_slice[part].isfinite().all():
                text = f"{_who(engine)}, in the gradient of {slot.spec.name}"
                return Finding(microbatch=0, position=position, rank=engine.groups.rank, text=text)
    return None


def _first(engine: TrainEngine, mine: Finding | None) -> Finding | None:
    """Return the earliest finding of all ranks, the same on each."""
    finding = mine or Finding(microbatch=_NOTHING, position=0, rank=0, text="")
    device = next(engine.model.stage.parameters()).device
    key = torch.tensor([finding.microbatch, finding.position, finding.rank], device=device)
    text = finding.text.encode("ascii", "replace")[:_TEXT_BYTES].ljust(_TEXT_BYTES, b" ")
    row = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    keys = engine.groups.world.gather_rows(key, name="finding.place").tolist()
    texts = engine.groups.world.gather_rows(row, name="finding.text").cpu()
    (microbatch, position, rank), index = min((k, i) for i, k in enumerate(keys))
    if microbatch == _NOTHING:
        return None
    told = bytes(texts[index].tolist()).decode("ascii").rstrip()
    return Finding(microbatch=microbatch, position=position, rank=rank, text=told)


def _who(engine: TrainEngine) -> str:
    rank = engine.groups.rank
    return f"rank {rank} ({engine.plan.mesh.label(rank)})"


def _some(samples: Sequence[int]) -> str:
    shown = ", ".join(str(sample) for sample in samples[:4])
    return shown + (", ..." if len(samples) > 4 else "")
