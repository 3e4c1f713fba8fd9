"""torch.distributed.pipelining: one factory per schedule, replicas by DDP where dp > 1."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.nn import functional as fn
from torch.nn.parallel import DistributedDataParallel

from bench.prove_peers.composition import Composition, Losses
from echelon.core.axis import Axis
from echelon.core.plan import Plan
from echelon.cost.seconds.stages import split_layers
from echelon.launch.context import RankContext
from echelon.models.batch import IGNORED_LABEL, TokenBatch
from echelon.models.decoder import Decoder
from echelon.proof.subject import ProofBatch


class StageModule(nn.Module):
    """A part of the decoder that takes and gives tensors only, as the schedules demand."""

    def __init__(self, part: Decoder, sequences: int, length: int) -> None:
        """Wrap `part` for microbatches of `sequences` x `length` tokens."""
        super().__init__()
        self.part = part
        self.sequences, self.length = sequences, length

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x_ND for the next stage or, on the last one, logits_NV."""
        tokens_N = x.t().reshape(-1) if self.part.first else torch.empty(0, dtype=torch.int64)
        if not self.part.first:
            tokens_N = tokens_N.new_zeros(self.sequences * self.length)
        ids = torch.zeros(self.sequences, dtype=torch.int64)
        tokens_BT = tokens_N.view(self.length, self.sequences).t()
        batch = TokenBatch.from_rows(tokens_BT, tokens_BT, ids)
        out_ND = self.part.hidden(None if self.part.first else x, batch)
        if not self.part.last:
            return out_ND
        return fn.linear(self.part.norm(out_ND), self.part.head_weight)


class Pipelined(Composition):
    """A pipeline schedule of torch; `stage_of` says which stages a rank owns."""

    schedule_class: Any = Schedule1F1B
    virtual_stages = 1
    v_shaped = False

    parts: list[Decoder]
    schedule: Any
    pipe_group: dist.ProcessGroup
    scale: float

    def build(self) -> None:
        """Make the stages of this rank, wrap them in DDP, and build the schedule."""
        mesh, plan = self.plan.mesh, self.plan
        device_mesh = init_device_mesh(
            "cpu", (mesh.pp, self.dp, mesh.tp), mesh_dim_names=("pp", "dp", "tp")
        )
        count = mesh.pp * self.virtual_stages
        blocks = split_layers(plan.model.layers, count)
        self.pipe_group = device_mesh["pp"].get_group()
        self.parts = []
        stages: list[PipelineStage] = []
        for index in self._own_stages(count):
            part = self.decoder(blocks[index], first=index == 0, last=index == count - 1)
            self.parts.append(part)
            module: nn.Module = StageModule(
                part, plan.layout.microbatch_sequences, plan.mathematics.sequence_length
            )
            if self.dp > 1:
                module = DistributedDataParallel(
                    module, process_group=device_mesh["dp"].get_group()
                )
            given, made = self._examples(part)
            stages.append(
                PipelineStage(
                    module,
                    index,
                    count,
                    torch.device("cpu"),
                    # Without examples torch finds the shapes by a forward outside `no_sync`,
                    # which arms DDP: later schedules then reduce the first microbatch too.
                    input_args=given,
                    output_args=made,
                    group=self.pipe_group,
                )
            )
        own: Any = stages if self.virtual_stages > 1 else stages[0]
        self.scale = 1.0
        self.schedule = self.schedule_class(
            own, n_microbatches=plan.num_microbatches, loss_fn=self._loss, scale_grads=False
        )

    def named_weights(self) -> dict[str, nn.Parameter]:
        """Return the weights of this rank's stages."""
        return {name: w for part in self.parts for name, w in part.named_parameters()}

    def forward_backward(self, batch: ProofBatch, scale: float) -> Losses:
        """Run the schedule on this rank's rows."""
        self.scale = scale
        count = self.plan.num_microbatches
        rows = [batch.microbatch(self.plan, self.dp_rank, m) for m in range(count)]
        inputs = torch.cat([one.inputs_BT for one in rows])
        labels = torch.cat([one.labels_BT for one in rows])
        losses: list[torch.Tensor] = []
        first = any(part.first for part in self.parts)
        arguments = (inputs,) if first else ()
        if any(part.last for part in self.parts):
            self.schedule.step(*arguments, target=labels, losses=losses)
        else:
            self.schedule.step(*arguments)
        return {
            (self.dp_rank, m): (
                loss.item() / scale,
                int((rows[m].labels_BT != IGNORED_LABEL).sum()),
            )
            for m, loss in enumerate(losses)
        }

    def blocks_run(self) -> tuple[int, ...]:
        """Return the blocks that this rank ran, in the words of the plan.

        A plan has one stage per rank here; a schedule with several deals blocks out otherwise, and
        where a block runs is no part of the mathematics. So a block counts for the rank that the
        plan gives it to when exactly one rank of the pipeline ran it.
        """
        if self.virtual_stages == 1:
            return super().blocks_run()
        everyone: list[tuple[int, ...]] = [()] * self.plan.mesh.pp
        dist.all_gather_object(everyone, tuple(self.layers_run), group=self.pipe_group)
        ran = [block for one in everyone for block in one]
        mine = self.plan.layout.pipeline.stages[self.here[Axis.PP]]
        return tuple(block for block in mine if ran.count(block) == 1)

    def _loss(self, logits_NV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        labels_N = labels_BT.t().reshape(-1)
        total = fn.cross_entropy(logits_NV, labels_N, reduction="sum", ignore_index=IGNORED_LABEL)
        return total * self.scale

    def _examples(self, part: Decoder) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tensors of the shapes that a stage takes and gives."""
        plan, dtype = self.plan, next(part.parameters()).dtype
        sequences = plan.layout.microbatch_sequences
        tokens = sequences * plan.mathematics.sequence_length
        stream = torch.zeros(tokens, plan.model.hidden, dtype=dtype, requires_grad=True)
        logits = torch.zeros(tokens, plan.model.vocab, dtype=dtype, requires_grad=True)
        ids = torch.zeros(sequences, plan.mathematics.sequence_length, dtype=torch.int64)
        return ids if part.first else stream, logits if part.last else stream

    def _own_stages(self, count: int) -> list[int]:
        rank, pp = self.here[Axis.PP], self.plan.mesh.pp
        if self.v_shaped:
            return [rank, count - 1 - rank]
        return list(range(rank, count, pp))


class Interleaved(Pipelined):
    """Interleaved 1F1B: two stages per rank, whole backward passes."""

    schedule_class = ScheduleInterleaved1F1B
    virtual_stages = 2


class InterleavedZeroBubble(Pipelined):
    """Interleaved zero bubble: backward is split into input and weight gradients."""

    schedule_class = ScheduleInterleavedZeroBubble
    virtual_stages = 2


class ZeroBubbleV(InterleavedZeroBubble):
    """Zero bubble with V-shaped placement."""

    schedule_class = ScheduleZBVZeroBubble
    v_shaped = True


class DualPipeV(InterleavedZeroBubble):
    """DualPipeV: forward of one microbatch beside backward of another."""

    schedule_class = ScheduleDualPipeV
    v_shaped = True


def one_f_one_b(place: RankContext, plan: Plan) -> Composition:
    """Return 1F1B as a subject."""
    return Pipelined(place, plan)


def interleaved(place: RankContext, plan: Plan) -> Composition:
    """Return interleaved 1F1B as a subject."""
    return Interleaved(place, plan)


def interleaved_zero_bubble(place: RankContext, plan: Plan) -> Composition:
    """Return interleaved zero bubble as a subject."""
    return InterleavedZeroBubble(place, plan)


def zero_bubble_v(place: RankContext, plan: Plan) -> Composition:
    """Return ZBV zero bubble as a subject."""
    return ZeroBubbleV(place, plan)


def dual_pipe_v(place: RankContext, plan: Plan) -> Composition:
    """Return DualPipeV as a subject."""
    return DualPipeV(place, plan)
