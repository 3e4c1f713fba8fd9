"""One mixture of experts over ranks: what each rank runs, and the same on one device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast
from unittest.mock import patch

import torch

from echelon.core.axis import Axis
from echelon.core.event import Event, EventList
from echelon.core.model_shape import Experts
from echelon.core.plan import Plan
from echelon.launch.context import RankContext
from echelon.models.batch import TokenBatch, positions_of
from echelon.models.decoder import Block
from echelon.models.moe import MixtureOfExperts, ReferenceRouting, RoutingNotes, mixture_reference
from echelon.parallel.device_mesh import rank_groups
from echelon.parallel.expert import ExpertParallel, LayerLoad
from echelon.parallel.expert.router import Router
from echelon.parallel.expert.router import TokenRouting as RankRouted
from echelon.parallel.transport import collectives
from echelon.parallel.transport.messages import (
    GlooPeers,
    Messages,
    PendingWorks,
    start_nccl_exchange,
)
from echelon.parallel.transport.recorder import Recorder
from echelon.training.subject import rank_batches
from tests.parallel.layouts import MIXTRAL, plan_of
from tests.parallel.one_device import Values, decoder, gradient, make_rows, random_values
from tests.parallel.targets import Built, Shards, build, copies, run_and_record

ONE_BLOCK = replace(MIXTRAL, layers=1)
EXPERTS: Experts = Experts(num_experts=8, top_k=2, ffn=12, shared_experts=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A stream of all tokens of a global batch of one microbatch on each data rank, [T x B, D]."""

    x_ND: torch.Tensor
    dy_ND: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """What one rank made of the mixture of block 0.

    `rows` says where its rows lie in the whole stream. `tokens`, `chosen` and `kept` say how it
    routed, by the global numbers of tokens; `arrived` how many rows came to its experts, by chunk.
    """

    rows: torch.Tensor
    out: torch.Tensor
    dx: torch.Tensor
    gradients: Shards
    events: list[Event]
    tokens: torch.Tensor
    chosen: torch.Tensor
    kept: torch.Tensor
    arrived: list[list[int]]
    load: LayerLoad

    def sent(self, axis: str) -> Mapping[str, int]:
        """Return the bytes sent over an axis, by name."""
        total: dict[str, int] = {}
        for event in self.events:
            if event.axis == axis:
                total[event.name] = total.get(event.name, 0) + event.bytes
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class OneDevice:
    """The same of all tokens on one device."""

    out: torch.Tensor
    dx: torch.Tensor
    gradients: Values
    routed: ReferenceRouting


def mixture_plan(*, nodes: int = 1, experts: Experts = EXPERTS, **chosen: Any) -> Plan:
    """Return a plan of one block and one microbatch of two sequences, on some nodes."""
    settings = {"microbatches": 1, "microbatch_sequences": 2, **chosen}
    layout = settings.pop("layout", None)
    plan = plan_of(model=replace(ONE_BLOCK, experts=experts), **settings)
    cluster = replace(
        plan.cluster, nodes=nodes, devices_per_node=max(1, plan.mesh.world_size // nodes)
    )
    placed = plan.layout if layout is None else replace(plan.layout, experts=layout)
    return replace(plan, cluster=cluster, layout=placed)


def stream_of(plan: Plan, seed: int = 11) -> Stream:
    """Return a random stream and the gradient of what is made of it."""
    generator = torch.Generator().manual_seed(seed)
    tokens = plan.mathematics.global_sequences * plan.mathematics.sequence_length
    shape = (tokens, plan.model.hidden)
    x_ND, dy_ND = (torch.randn(shape, dtype=torch.float64, generator=generator) for _ in range(2))
    return Stream(x_ND=x_ND, dy_ND=dy_ND)


def one_device(plan: Plan, stream: Stream) -> OneDevice:
    """Return what one device makes of the stream."""
    batch = make_rows(plan, 0).batch(0)
    block = decoder(plan, random_values(plan)).layers["0"]
    assert isinstance(block, Block)
    assert isinstance(block.mlp, MixtureOfExperts)
    notes = RoutingNotes(balance=plan.mathematics.balance)
    x_ND = stream.x_ND.clone().requires_grad_()
    y_ND = mixture_reference(x_ND, block.mlp, batch, notes)
    y_ND.backward(stream.dy_ND)
    assert x_ND.grad is not None
    named = block.mlp.named_parameters()
    return OneDevice(
        out=y_ND.detach(),
        dx=x_ND.grad,
        gradients={f"layers.0.mlp.{name}": gradient(one) for name, one in named},
        routed=notes.routed[0],
    )


def mix(context: RankContext, argument: tuple[Plan, Stream]) -> Mixed:
    """Run the mixture of block 0 on this rank's rows of the stream, forward and backward."""
    plan, stream = argument
    built = build(context, plan)
    batch = own_batch(built, plan)
    rows = rows_of(built, plan, batch)
    mixture, experts = mixture_of(built)
    routes = note_routes(experts.router)
    arrived = note_arrivals(experts)
    x_nD = stream.x_ND[rows].requires_grad_()
    built.events.events.clear()
    one = run_and_record(built, lambda: (mixture(x_nD, batch), x_nD), stream.dy_ND[rows])
    tokens, routed = routes[-1]
    loads = experts.router.balancer.finish()
    kept = routed.kept_nK
    return Mixed(
        rows=rows,
        out=one.out,
        dx=one.dx,
        gradients=copies(one.gradients),
        events=list(one.events),
        tokens=tokens,
        chosen=routed.chosen_nK,
        kept=torch.ones_like(routed.chosen_nK, dtype=torch.bool) if kept is None else kept,
        arrived=arrived,
        load=loads[0],
    )


def own_batch(built: Built, plan: Plan) -> TokenBatch:
    """Return this rank's microbatch."""
    runs = plan.placement.runs(plan.mesh.coordinates(built.groups.rank)[Axis.CP])
    data_rank = built.groups.data.index // plan.mesh.cp
    (batch,) = rank_batches(plan, make_rows(plan, 0), data_rank, 0, runs=runs)
    return batch


def rows_of(built: Built, plan: Plan, batch: TokenBatch) -> torch.Tensor:
    """Return where this rank's rows lie in the stream: token (t, b) of all is row t x B + b."""
    size, all_sequences = plan.layout.microbatch_sequences, plan.mathematics.global_sequences
    first = built.groups.data.index // plan.mesh.cp * size
    positions_T = positions_of(batch.runs, torch.device("cpu"))
    sequences_B = torch.arange(first, first + size)
    rows = (positions_T[:, None] * all_sequences + sequences_B).reshape(-1)
    if plan.layout.sequence_parallel:
        return rows.chunk(plan.mesh.tp)[built.groups.tensor.index]
    return rows


def mixture_of(built: Built) -> tuple[MixtureOfExperts, ExpertParallel]:
    """Return the mixture of block 0, and what runs it."""
    stage: Any = next(iter(built.model.stages.values()))
    block = stage.layers["0"]
    assert isinstance(block.mlp, MixtureOfExperts)
    return block.mlp, stage.operations.experts


def note_routes(router: Router) -> list[tuple[torch.Tensor, RankRouted]]:
    """Return a list of the tokens of each call of a router, and how it routed them."""
    route = router.route
    found: list[tuple[torch.Tensor, RankRouted]] = []

    def noted(x_nD: Any, weight_ED: Any, layer: int, tokens: Any, **options: Any) -> Any:
        routed = route(x_nD, weight_ED, layer, tokens, **options)
        found.append((tokens.number_n, routed))
        return routed

    router.route = noted
    return found


def note_arrivals(experts: ExpertParallel) -> list[list[int]]:
    """Return a list of the rows that come to each expert, by chunk."""
    make = experts._make_dispatcher
    found: list[list[int]] = []

    def noted(*arguments: Any) -> Any:
        made = make(*arguments)
        counts = made.rows_by_expert
        assert not isinstance(counts, torch.Tensor), "a CPU counts"
        found.append(list(counts))
        return made

    experts._make_dispatcher = cast(Any, noted)
    return found


def hop_ranks(context: RankContext, plan: Plan) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks that this one meets across nodes, and within its node."""
    groups = rank_groups(plan, Recorder(context.rank, EventList()))
    return groups.expert_across.ranks, groups.expert_within.ranks


def mix_not_a_number(context: RankContext, argument: tuple[Plan, Stream]) -> Mixed:
    """Run the mixture where the second token of the stream is not a number."""
    plan, stream = argument
    x_ND = stream.x_ND.clone()
    x_ND[1] = torch.nan
    return mix(context, (plan, replace(stream, x_ND=x_ND)))


def mix_in_batches_of_messages(context: RankContext, argument: tuple[Plan, Stream]) -> Mixed:
    """Run the mixture with the exchanges of NCCL, batches of messages, which Gloo can run too."""

    def batched(sends: Messages, receives: Messages, peers: GlooPeers) -> PendingWorks:
        return start_nccl_exchange(sends, receives, peers.ranks, peers.group)

    with patch.object(collectives, "start_gloo_exchange", batched):
        return mix(context, argument)
