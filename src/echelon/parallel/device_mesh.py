# SPDX-License-Identifier: Apache-2.0
"""The one place where a Mesh becomes process groups."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby, product
from typing import cast

import torch.distributed as dist

from echelon.core.axis import LOSS_AXES, SHARD_AXES, Axis
from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.event import Event, NoEvents
from echelon.core.parameters import ParameterSpec
from echelon.core.plan import Plan
from echelon.cost.bytes.all_reduce import sum_group
from echelon.cost.bytes.data import (
    EXPERT_DATA_AXIS,
    EXPERT_SHARD_ACROSS_AXIS,
    EXPERT_SHARD_AXIS,
    EXPERT_SHARD_WITHIN_AXIS,
    SHARD_ACROSS_AXIS,
    SHARD_WITHIN_AXIS,
)
from echelon.cost.bytes.servers import SERVERS_AXIS
from echelon.layout.data_groups import across_groups, node_groups
from echelon.layout.islands import Island, islands_of, plan_and_rank
from echelon.layout.muon import STAGE_AXES
from echelon.parallel.completion.completion import Completion
from echelon.parallel.transport.collectives import Communicator, Group
from echelon.parallel.transport.recorder import Recorder
from echelon.schedule.from_plan import stage_placement_from_plan

_Ranks = Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLinks:
    """Hold the links of an asynchronous worker or server."""

    pairs: Mapping[int, Group]
    """The pair of this rank and another, by the other: the worker first, then the server."""
    events: deque[Event]
    """What a server's threads have sent: they do not write events themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroups:
    """Hold the groups of one rank."""

    plan: Plan
    """The plan of the ranks that take a step together."""
    rank: int
    """This rank, of its island where there are islands of local SGD."""
    recorder: Recorder
    """What writes events down."""
    completion: Completion
    """What makes whatever starts asynchronous operations."""
    everyone: Group
    """All ranks of the run, which save and load together."""
    islands: Group
    """The ranks of the same place in each island of local SGD: the others hold what this one does
    of a model that was trained on other samples."""
    world: Group
    """All ranks that take a step together, those of an island where there are some: the few numbers
    of a step that every rank needs."""
    servers: Group
    """All ranks, where some are parameter servers: gradients go to them, parameters come back."""
    server_peers: Group
    """Parameter servers among themselves, where they add up norms without their workers."""
    server_links: ServerLinks
    """Of a worker and a server that do not wait for others: the links between them."""
    data: Group
    """dp_replicate x dp_shard x cp: sums losses and gradients."""
    shard: Group
    """dp_shard x cp: cuts slices."""
    shard_within: Group
    """Those of `shard` on this node, where they keep secondary slices or sum first."""
    shard_across: Group
    """Those of `shard` with this place on each node, where these sum second."""
    replicate: Group
    """dp_replicate: the ranks that hold copies of a slice."""
    stage: Group
    """All ranks of one pipeline stage, which share out Muon's matrices."""
    tensor: Group
    """`tp`."""
    ring: Group
    """The part of `cp` that sends keys around (`core.attention_mask`)."""
    ulysses: Group
    """The part of `cp` whose neighbours exchange heads."""
    pipe_forward: Group
    """Activations between stages. NCCL runs the messages of a communicator in order, so each
    direction has its own."""
    pipe_backward: Group
    """Gradients between stages."""
    tied: Group
    """The ranks of the first and the last stage, where both hold the embedding."""
    mirror: Group
    """Two ranks that hold copies of the same stages."""
    expert: Group
    """The ranks that hold shares of the routed experts (`core.mesh`)."""
    expert_across: Group
    """Those of `expert` with the same place on each node."""
    expert_within: Group
    """Those of `expert` on this node."""
    expert_data: Group
    """What `data` is, for routed experts."""
    expert_shard: Group
    """What `shard` is, for routed experts."""
    expert_shard_within: Group
    """What `shard_within` is, for routed experts."""
    expert_shard_across: Group
    """What `shard_across` is, for routed experts."""
    expert_tensor: Group
    """The ranks that hold pieces of the same experts."""
    sequence: Group
    """cp x tp: has the tokens of the same sequences."""

    @property
    def data_rank(self) -> int:
        """The share of the samples of the whole run that this rank reads."""
        mesh = self.plan.mesh
        return self.islands.index * mesh.dp + self.data.index // mesh.cp

    def tensor_group_for(self, spec: ParameterSpec) -> Group:
        """Return the ranks that hold the pieces of a parameter, where it has a dim to cut."""
        return self.tensor if spec.expert is None else self.expert_tensor

    def data_groups(self, *, expert: bool) -> tuple[Group, Group]:
        """Return the ranks that sum a gradient, and those of one replica, which cut it in slices.

        Routed experts have groups of their own.
        """
        return (self.expert_data, self.expert_shard) if expert else (self.data, self.shard)

    def hop_groups(self, *, expert: bool) -> tuple[Group, Group]:
        """Return the ranks of this node that share out, and those of this place on all nodes."""
        if expert:
            return self.expert_shard_within, self.expert_shard_across
        return self.shard_within, self.shard_across


def shares_sequences(plan: Plan) -> bool:
    """Return whether ranks must know of one another's tokens of a sequence before they go on."""
    balance = plan.mathematics.balance
    return balance.counts_first or balance.capacity_factor is not None


def rank_groups(plan: Plan, recorder: Recorder, completion: Completion | None = None) -> RankGroups:
    """Make the groups of the recorder's rank; every rank must call this, with the same plan.

    A group that the plan does not need is one of this rank alone. `completion` says when operations
    complete: as the transport does, where it is not given. Of a plan with islands all groups are
    those of this rank's island, but `islands` and `everyone`.
    """
    completion = completion or Completion()
    recorder.devices_per_node = plan.cluster.devices_per_node
    maker = GroupMaker(plan, recorder, completion)
    everyone = islands = None
    if plan.mathematics.local_sgd.is_elastic:
        # Nobody may wait for an island that can be lost: each is a world of its own.
        islands = maker.unconnected(Axis.DP_REPLICATE.value, plan.mesh.groups(Axis.DP_REPLICATE))
        plan, rank = plan_and_rank(plan, recorder.rank)
        recorder = recorder.within(recorder.rank - rank)
        maker = GroupMaker(plan, recorder, completion)
    elif plan.mathematics.local_sgd.active:
        everyone = maker.over("everyone", [tuple(range(plan.mesh.world_size))])
        replicas = plan.mesh.groups(Axis.DP_REPLICATE)
        islands = maker.over(Axis.DP_REPLICATE.value, replicas, sums=True)
        maker.islands = islands_of(plan)
    blocks = plan.mathematics.local_sgd.quantised
    plan, rank = plan_and_rank(plan, recorder.rank)
    mesh, over = plan.mesh, maker.over
    experts, has_experts = plan.layout.experts, plan.model.experts is not None
    u, contexts = plan.layout.context.ulysses_degree, mesh.groups(Axis.CP)
    neighbours = [ranks[i : i + u] for ranks in contexts for i in range(0, len(ranks), u)]
    slices, expert_slices = plan.layout.zero.stage > 0, has_experts and experts.zero_stage > 0
    replicas = mesh.groups(Axis.DP_REPLICATE)
    whole = OPTIMIZERS[plan.mathematics.optimizer.kind].needs_whole_matrices
    by_sequence = has_experts and shares_sequences(plan)
    tensor = over(Axis.TP.value, mesh.groups(Axis.TP), slices=True)
    updates = plan.mathematics.updates
    all_ranks, server_ranks = [tuple(range(mesh.world_size))], [tuple(mesh.server_ranks)]
    world = over("world", all_ranks)
    groups = RankGroups(
        plan=plan,
        rank=rank,
        recorder=recorder,
        completion=completion,
        everyone=world if everyone is None else everyone,
        islands=over(Axis.DP_REPLICATE.value, ()) if islands is None else islands,
        world=world,
        servers=over(SERVERS_AXIS, all_ranks, needed=mesh.servers > 0),
        server_peers=over(SERVERS_AXIS, server_ranks, needed=updates.is_asynchronous),
        server_links=_server_links(plan, recorder, completion),
        data=over("dp", mesh.groups(*LOSS_AXES), sums=True),
        shard=over(Axis.DP_SHARD.value, mesh.groups(*SHARD_AXES), needed=slices, slices=True),
        shard_within=over(SHARD_WITHIN_AXIS, node_groups(plan), slices=True),
        shard_across=over(SHARD_ACROSS_AXIS, across_groups(plan)),
        replicate=over(
            Axis.DP_REPLICATE.value, replicas, needed=slices or expert_slices, sums=True
        ),
        stage=over("stage", mesh.groups(*STAGE_AXES), needed=whole or has_experts or blocks),
        tensor=tensor,
        ring=over(Axis.CP.value, [ranks[place::u] for ranks in contexts for place in range(u)]),
        ulysses=over(Axis.CP.value, neighbours),
        **_pipeline_groups(plan, maker),
        **_expert_groups(plan, maker),
        expert_tensor=tensor if experts.expert_tp > 1 else over(Axis.TP.value, ()),
        sequence=over("sequence", mesh.groups(Axis.CP, Axis.TP), needed=by_sequence),
    )
    maker.open_all()
    for group in (groups.pipe_forward, groups.pipe_backward):
        if group.communicator is not None:
            group.communicator.open_links(_pipeline_links(plan), recorder)
    return groups


class GroupMaker:
    """Make the groups of one rank over communicators that are made and opened in one order.

    Every rank goes through all groups in the same order, so that none waits in the first call of
    one for a member that waits in that of another. Groups of the same ranks share a communicator
    where these ranks run the same calls in the same order, which stages of a pipeline do not. Once
    there are `islands`, groups are of ranks of one of them, and made for all.
    """

    def __init__(self, plan: Plan, recorder: Recorder, completion: Completion) -> None:
        self._plan, self._recorder, self._completion = plan, recorder, completion
        self.islands: tuple[Island, ...] = ()
        self._shared: dict[tuple[int, ...], Communicator | None] = {}
        self._collective: list[tuple[str, Communicator]] = []
        self._count = 0

    def over(
        self,
        axis: str,
        groups: _Ranks,
        *,
        needed: bool = True,
        sums: bool = False,
        slices: bool = False,
    ) -> Group:
        """Return the group of this rank; one of its own where it is in none, or none is needed.

        One that `sums` does so by the algorithm of the plan; one of `slices` scatters and gathers
        by it, too.
        """
        self._count += 1
        mine: tuple[int, ...] = (self._recorder.rank,)
        found: Communicator | None = None
        for ranks in self._of_all_islands(groups) if needed else ():
            if len(ranks) > 1 and ranks not in self._shared:
                self._shared[ranks] = self._made(f"{axis}.{self._count}", ranks)
            if self._recorder.rank in ranks:
                mine, found = ranks, self._shared.get(ranks)
        group = self._completion.group(axis, mine, found, self._recorder)
        if sums or slices:
            how = sum_group(self._plan, mine, self._recorder.rank)
            group.sum_by(how, slices=slices)
        return group

    def unconnected(self, axis: str, groups: _Ranks) -> Group:
        """Return the group of this rank as a place only: its members never call one another."""
        rank = self._recorder.rank
        mine = next((ranks for ranks in groups if rank in ranks), (rank,))
        return self._completion.group(axis, mine, None, self._recorder)

    def between_stages(
        self, name: str, groups: _Ranks, *, needed: bool = True, messages: bool = False
    ) -> Group:
        """Return the group of this rank, which shares its communicator with no other group.

        Of one that carries messages only the links between pairs are used; any other one sums.
        """
        mine: tuple[int, ...] = (self._recorder.rank,)
        found: Communicator | None = None
        for ranks in self._of_all_islands(groups) if needed else ():
            made = self._made(name, ranks, opens=not messages) if len(ranks) > 1 else None
            if self._recorder.rank in ranks:
                mine, found = ranks, made
        group = self._completion.group(Axis.PP.value, mine, found, self._recorder)
        if not messages:
            group.sum_by(sum_group(self._plan, mine, self._recorder.rank), slices=False)
        return group

    def _of_all_islands(self, groups: _Ranks) -> _Ranks:
        """Return groups of an island as those of all: every rank takes part in making each."""
        if not self.islands:
            return groups
        return [one.lifted(ranks) for one in self.islands for ranks in groups]

    def open_all(self) -> None:
        """Open every communicator that runs collectives, in the order in which they were made."""
        for name, communicator in self._collective:
            communicator.open(self._recorder, name)

    def _made(
        self, name: str, ranks: tuple[int, ...], *, opens: bool = True
    ) -> Communicator | None:
        made = self._completion.communicator(name, ranks, self._recorder.rank)
        if made is not None and opens:
            self._collective.append((name, made))
        return made


def _server_links(plan: Plan, recorder: Recorder, completion: Completion) -> ServerLinks:
    """Return the pairs of a worker and a server that this rank is one of.

    A server serves each pair in a thread, so these write into a queue, and mark no waits.
    """
    mesh, events = plan.mesh, deque[Event]()
    found: dict[int, Group] = {}
    if plan.mathematics.updates.is_asynchronous:
        told = recorder.beside(EventQueue(events)) if mesh.is_server(recorder.rank) else recorder
        for pair in product(range(mesh.num_workers), mesh.server_ranks):
            made = completion.communicator(f"{SERVERS_AXIS} {pair}", pair, recorder.rank)
            if recorder.rank in pair:
                other = pair[1 - pair.index(recorder.rank)]
                found[other] = completion.group(SERVERS_AXIS, pair, made, told)
    return ServerLinks(pairs=found, events=events)


@dataclass(frozen=True, slots=True)
class EventQueue:
    """Take events of several threads."""

    events: deque[Event]

    def record(self, event: Event) -> None:
        """Append one event."""
        self.events.append(event)


def _pipeline_groups(plan: Plan, maker: GroupMaker) -> dict[str, Group]:
    """Return the groups of pipeline ranks, by the names of their fields."""
    mesh, placement = plan.mesh, stage_placement_from_plan(plan)
    pipes, mirrored = mesh.groups(Axis.PP), bool(placement.mirrored)
    first, last = placement.stage_ranks[0], placement.stage_ranks[-1]
    half = range(mesh.pp // 2)
    mirrors = [(ranks[place], ranks[-1 - place]) for ranks in pipes for place in half]
    one_each = first != last and not mirrored
    return {
        "pipe_forward": maker.between_stages("pipe_forward", pipes, messages=True),
        "pipe_backward": maker.between_stages("pipe_backward", pipes, messages=True),
        "tied": maker.between_stages(
            "tied",
            [(ranks[first], ranks[last]) for ranks in pipes],
            needed=plan.model.tied and one_each,
        ),
        "mirror": maker.between_stages("mirror", mirrors, needed=mirrored),
    }


def _pipeline_links(plan: Plan) -> list[tuple[int, int]]:
    """Return the pairs of places in the pipeline between which messages travel, in order."""
    placement = stage_placement_from_plan(plan)
    between = {
        tuple(sorted((placement.rank_of(stage, one), placement.rank_of(stage + 1, one))))
        for stage in range(placement.num_stages - 1)
        for one in {0, *placement.mirrored[:1]}
    }
    return sorted((a, b) for a, b in between if a != b)


def _expert_groups(plan: Plan, maker: GroupMaker) -> dict[str, Group]:
    """Return the groups of routed experts, by the names of their fields."""
    mesh, layout = plan.mesh, plan.layout.experts
    folds: _Ranks = ()
    copies: _Ranks = ()
    slices: _Ranks = ()
    nodes: list[list[tuple[int, ...]]] = []
    if plan.model.experts is not None:
        folds = mesh.expert_groups(expert_tp=layout.expert_tp)
        copies = mesh.expert_data_groups(expert_tp=layout.expert_tp)
        if layout.zero_stage > 0:
            slices = mesh.expert_shard_groups(expert_tp=layout.expert_tp)
        if layout.dispatch == "two-hop":
            size = plan.cluster.devices_per_node
            nodes = [
                [tuple(one) for _, one in groupby(fold, lambda rank: rank // size)]
                for fold in folds
            ]
    return {
        "expert": maker.over(Axis.EP.value, folds),
        "expert_across": maker.over(
            "ep_across", [ranks for one in nodes for ranks in zip(*one, strict=True)]
        ),
        "expert_within": maker.over("ep_within", [ranks for one in nodes for ranks in one]),
        "expert_data": maker.over(EXPERT_DATA_AXIS, copies, sums=True),
        "expert_shard": maker.over(EXPERT_SHARD_AXIS, slices, slices=True),
        "expert_shard_within": maker.over(
            EXPERT_SHARD_WITHIN_AXIS, node_groups(plan, expert=True), slices=True
        ),
        "expert_shard_across": maker.over(
            EXPERT_SHARD_ACROSS_AXIS, across_groups(plan, expert=True)
        ),
    }


def joined_group(group: dist.ProcessGroup | None) -> Group:
    """Return a process group, or that of all ranks, as a group that records nothing."""
    found = group or cast("dist.ProcessGroup", dist.group.WORLD)
    communicator, rank = _communicator(found), dist.get_rank()
    return Group("", communicator.ranks, rank, communicator, Recorder(rank, NoEvents()))


@cache
def _communicator(group: dist.ProcessGroup) -> Communicator:
    """Return the one communicator of a process group, which numbers its exchanges."""
    return Communicator(dist.get_process_group_ranks(group), group, group.group_name)
