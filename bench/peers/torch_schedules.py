"""torch.distributed.pipelining in each of its schedules, over the Hugging Face Llama.

The variant names one of Echelon's schedules; `TORCH_SCHEDULES` gives the class that runs the same.
Where torch has none but a variant brings rows of actions, torch's runtime runs those. The loss of
a microbatch is divided by their number, so that gradients need no second pass that scales them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from bench.harness.data import global_batch
from bench.harness.spec import NotApplicable, Settings, StepFunction
from bench.peers.llama import adamw, cross_entropy, join, llama
from bench.peers.torch_pp import Stage
from bench.pipeline.spec import TORCH_SCHEDULES, V_SHAPED, PipelineVariant


def own_stages(schedule: str, rank: int, num_ranks: int, per_rank: int) -> tuple[int, ...]:
    """Return the stages of a rank: dealt out in turn, or down and up again in a V."""
    if schedule in V_SHAPED:
        return rank, per_rank * num_ranks - 1 - rank
    return tuple(range(rank, per_rank * num_ranks, num_ranks))


def build(settings: Settings) -> StepFunction:
    """Return the step of one rank."""
    rank, num_ranks = join(settings)
    variant = PipelineVariant.parse(settings.variant)
    count = num_ranks * variant.per_rank
    whole = llama(settings)
    mine = own_stages(variant.schedule, rank, num_ranks, variant.per_rank)
    modules = [Stage(whole, index, count) for index in mine]
    stages = [
        PipelineStage(module, index, count, torch.device("cpu"))
        for module, index in zip(modules, mine, strict=True)
    ]
    schedule = _schedule(settings, variant, stages)
    optimizer = adamw(settings, _parameters(modules))
    reads, ends = 0 in mine, count - 1 in mine

    def step(number: int) -> float | None:
        optimizer.zero_grad(set_to_none=True)
        inputs, labels = global_batch(settings, number)
        losses: list[torch.Tensor] = []
        given = (inputs,) if reads else ()
        if ends:
            schedule.step(*given, target=labels, losses=losses)
        else:
            schedule.step(*given)
        optimizer.step()
        return sum(loss.item() for loss in losses) if losses else None

    return step


def _schedule(settings: Settings, variant: PipelineVariant, stages: list[PipelineStage]) -> Any:
    count = settings.mode.microbatches

    def loss(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        return cross_entropy(logits_BTV, labels_BT) / count

    options: dict[str, Any] = {"n_microbatches": count, "loss_fn": loss, "scale_grads": False}
    if variant.schedule in TORCH_SCHEDULES:
        make: Any = getattr(pipelining, TORCH_SCHEDULES[variant.schedule])
        single = variant.schedule in ("gpipe", "1f1b")
        return make(stages[0] if single else stages, **options)
    if variant.rows:
        return _runtime(variant.rows, stages, options)
    raise NotApplicable(f"torch has no {variant.schedule}")


def _runtime(rows: tuple[str, ...], stages: list[PipelineStage], options: dict[str, Any]) -> Any:
    """Return torch's runtime with the actions of `rows`."""
    from torch.distributed.pipelining import schedules

    from echelon.schedule.action import Action, ActionKind

    private: Any = schedules
    kinds = {
        ActionKind.F: private.FORWARD,
        ActionKind.BW: private.FULL_BACKWARD,
        ActionKind.B: private.BACKWARD_INPUT,
        ActionKind.W: private.BACKWARD_WEIGHT,
    }
    runtime = private._PipelineScheduleRuntime(stages, **options)
    actions = {
        rank: [
            private._Action(action.stage, kinds[action.kind], action.microbatch)
            for action in map(Action.parse, row.split())
        ]
        for rank, row in enumerate(rows)
    }
    runtime._prepare_schedule_with_comms(actions)
    return runtime


def _parameters(modules: list[Stage]) -> list[nn.Parameter]:
    return [weight for module in modules for weight in module.parameters()]
