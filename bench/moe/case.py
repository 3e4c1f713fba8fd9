"""One block of experts as a case: forward, backward and weight gradients of one batch.

All cases of a size have the same weights and tokens. What a step returns is made of its outputs and
of the gradient of its input, so cases that agree in it computed the same.

Shapes: N tokens of this rank, D hidden.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, cast

import torch

from bench.harness.plans import bench_plan
from bench.harness.spec import Settings, StepFunction
from bench.moe.spec import Variant
from bench.peers.llama import join
from echelon.core.event import EventList
from echelon.core.experts import Balance, ExpertLayout
from echelon.core.model_shape import Experts
from echelon.core.parameters import parameters
from echelon.core.plan import Plan
from echelon.models.batch import TokenBatch
from echelon.models.counter_random import initial_values
from echelon.models.moe import MixtureOfExperts
from echelon.parallel.apply import apply_plan
from echelon.parallel.device_mesh import rank_groups
from echelon.parallel.transport.recorder import Recorder

BLOCK = "layers.0.mlp."


def moe_plan(settings: Settings) -> Plan:
    """Return the plan of a case; where tokens go in two hops, half of the ranks are a node."""
    variant, plan = Variant.parse(settings.variant), bench_plan(settings)
    ranks = settings.mode.dp
    nodes = 2 if variant.dispatch == "two-hop" else 1
    padded = variant.capacity_factor is not None
    return replace(
        plan,
        mathematics=replace(
            plan.mathematics,
            model=replace(
                plan.model,
                experts=Experts(
                    num_experts=variant.num_experts, top_k=variant.top_k, ffn=settings.size.ffn
                ),
            ),
            balance=Balance(capacity_factor=variant.capacity_factor),
        ),
        layout=replace(
            plan.layout,
            mesh=replace(plan.mesh, ep=ranks),
            experts=ExpertLayout(dispatch=variant.dispatch, chunks=variant.chunks, padded=padded),
        ),
        cluster=replace(plan.cluster, devices_per_node=ranks // nodes, nodes=nodes),
    )


class MoEStep(ABC):
    """Take steps of one rank."""

    def __init__(self, settings: Settings) -> None:
        """Draw this rank's part of the input, and of the gradient of the output."""
        self.plan = moe_plan(settings)
        size, ranks = settings.size, settings.mode.dp
        rank, _ = join(settings) if ranks > 1 else (0, 1)
        self.rank, here = rank, size.global_sequences // ranks
        generator = torch.Generator().manual_seed(settings.seed)
        shape = (size.sequence, size.global_sequences, size.hidden)
        mine = slice(rank * here, (rank + 1) * here)
        self.x_ND, self.dy_ND = (
            torch.randn(shape, generator=generator)[:, mine].flatten(0, 1) for _ in range(2)
        )
        tokens_BT = torch.zeros(here, size.sequence, dtype=torch.int64)
        ids_B = torch.arange(rank * here, (rank + 1) * here)
        self.batch = TokenBatch.from_rows(tokens_BT, tokens_BT, ids_B)
        self.events = EventList()
        self._num_ranks = ranks

    def __call__(self, number: int) -> float:
        """Take one step; the mean over ranks of what is returned is that of the whole batch."""
        x_ND = self.x_ND.detach().requires_grad_()
        y_ND = self.run(x_ND)
        assert x_ND.grad is not None
        told = torch.sum(y_ND.detach() * self.dy_ND) + torch.sum(x_ND.grad * self.x_ND)
        return float(told) * self._num_ranks

    @abstractmethod
    def run(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Return the outputs for x; its gradient and those of all weights are there, too."""


class EchelonBlock(MoEStep):
    """The block of Echelon, as the engine runs it."""

    def __init__(self, settings: Settings) -> None:
        """Build this rank's part of the experts."""
        super().__init__(settings)
        groups = rank_groups(self.plan, Recorder(self.rank, self.events))
        self.model = apply_plan(self.plan, groups, torch.device("cpu"))
        self.mixture = cast(MixtureOfExperts, self.model.stages[0].layers["0"].mlp)

    def run(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Return the outputs; gradients of weights are written into the buckets."""
        store, balancer = self.model.store, self.model.balancer
        assert balancer is not None
        store.start_step()
        balancer.start_step(1.0)
        store.start_backward(last=False)
        y_ND = self.mixture(x_ND, self.batch)
        y_ND.backward(self.dy_ND)
        store.run_deferred()
        return y_ND


class TransformersBlock(MoEStep):
    """`MixtralSparseMoeBlock` by autograd."""

    def __init__(self, settings: Settings) -> None:
        """Give it the same weights."""
        super().__init__(settings)
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

        variant = Variant.parse(settings.variant)
        sizes: dict[str, Any] = {
            "hidden_size": settings.size.hidden,
            "intermediate_size": settings.size.ffn,
            "num_local_experts": variant.num_experts,
            "num_experts_per_tok": variant.top_k,
            "experts_implementation": variant.maker,
        }
        self.block: Any = MixtralSparseMoeBlock(MixtralConfig(**sizes)).train()
        self._fill()

    @torch.no_grad()
    def _fill(self) -> None:
        experts, seed = self.block.experts, self.plan.mathematics.seed
        for spec in parameters(self.plan.model):
            if not spec.name.startswith(BLOCK):
                continue
            values = initial_values(self.plan.model, spec, seed)
            part = spec.name.split(".")[-2]
            if spec.expert is None:
                self.block.gate.weight.copy_(values)
            elif part == "down":
                experts.down_proj[spec.expert].copy_(values)
            else:
                experts.gate_up_proj[spec.expert].chunk(2)[part == "up"].copy_(values)

    def run(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Return the outputs; each weight gets a gradient of its own."""
        self.block.zero_grad()
        y_ND: torch.Tensor = self.block(x_ND[None])[0]
        y_ND.backward(self.dy_ND)
        return y_ND


def build(settings: Settings) -> StepFunction:
    """Return the step of one rank."""
    ours = Variant.parse(settings.variant).maker == "echelon"
    return EchelonBlock(settings) if ours else TransformersBlock(settings)


def recorded_bytes(step: MoEStep, *, reset: bool) -> dict[str, int]:
    """Return the bytes that Echelon recorded since the last reset, by axis."""
    if reset:
        step.events.events.clear()
    return step.events.bytes_by_axis()
