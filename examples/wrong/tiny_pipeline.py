"""Pipelining of the small decoder with torch's own stages and schedules, for several programs."""

from collections.abc import Callable
from typing import Any

import torch
from tiny import HIDDEN, LENGTH, SEQUENCES, VOCAB, Decoder, cross_entropy, decoder, rows
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage

import echelon as ec

MICROBATCHES = 4


def build_stages(
    case: ec.VerifyCase,
    mesh: DeviceMesh,
    indices: list[int],
    wrap: Callable[[Decoder], nn.Module] = lambda part: part,
) -> tuple[list[PipelineStage], list[nn.Module]]:
    """Return this rank's stages, and the modules that hold their weights."""
    count, replicas = mesh["pp"].size() * len(indices), mesh.size() // mesh["pp"].size()
    per_microbatch = SEQUENCES // replicas // MICROBATCHES
    stages: list[PipelineStage] = []
    modules: list[nn.Module] = []
    for index in indices:
        module = wrap(decoder(case).stage(index, count))
        ids = torch.zeros(per_microbatch, LENGTH, dtype=torch.int64)
        stream = torch.zeros(per_microbatch, LENGTH, HIDDEN, dtype=case.dtype, requires_grad=True)
        logits = torch.zeros(per_microbatch, LENGTH, VOCAB, dtype=case.dtype, requires_grad=True)
        stages.append(
            PipelineStage(
                module,
                index,
                count,
                torch.device(case.device),
                # Without examples torch finds shapes by a forward pass, which arms DDP too early.
                input_args=ids if index == 0 else stream,
                output_args=logits if index == count - 1 else stream,
                group=mesh.get_group("pp"),
            )
        )
        modules.append(module)
    return stages, modules


def run_schedule(schedule: Any, step: int, replica: int, replicas: int) -> torch.Tensor | None:
    """Run one step of `schedule` on the sequences of a replica; return its loss where it is."""
    inputs_BT, labels_BT = rows(step, replica, replicas)
    losses: list[torch.Tensor] = []
    schedule.step(inputs_BT, target=labels_BT, losses=losses)
    return torch.stack(losses).mean() if losses else None


__all__ = ["MICROBATCHES", "build_stages", "cross_entropy", "run_schedule"]
