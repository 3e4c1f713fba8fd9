"""The one place where a Mesh becomes process groups."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import cast

import torch.distributed as dist

from echelon.core.axis import LOSS_AXES, MESH_AXES, SHARD_AXES, Axis
from echelon.core.mesh import Mesh
from echelon.core.parameters import ParameterSpec
from echelon.core.plan import Plan
from echelon.cost.data_bytes import EXPERT_DATA_AXIS, EXPERT_SHARD_AXIS
from echelon.parallel.collectives import Group
from echelon.parallel.recorder import Recorder
from echelon.schedule.of_plan import placement_of

_Ranks = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class DataGroups:
    """The ranks that sum a gradient, and those of one replica, which cut it into slices."""

    data: Group
    shard: Group


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroups:
    """Hold the groups of one rank.

    `data` sums losses and gradients (dp_replicate x dp_shard x cp); `shard` (dp_shard x cp) cuts
    slices of which `replicate` ranks hold copies; `expert_data` and `expert_shard` are the same for
    routed experts, whose shares the ranks of `expert` hold (`core.mesh`) and whose pieces those of
    `expert_tensor`; `expert_across` has those of `expert` with the same place on each node, and
    `expert_within` those on this node. `sequence` (cp x tp) has the tokens of the same sequences;
    `stage` is all ranks of one pipeline stage, which share out Muon's matrices. `tensor` is `tp`.
    `ring` and `ulysses` are the two parts of `cp` (`core.placement`): the neighbours of a `ulysses`
    group exchange heads. Activations travel on `pipe_forward` and gradients on `pipe_backward`: one
    communicator each, because NCCL runs the messages of a communicator in order and the two
    directions would wait for each other. `tied` joins the ranks of the first and the last stage
    where both hold the embedding, `mirror` two ranks that hold copies of the same stages; `world`
    carries the few numbers of a step that every rank needs.
    """

    mesh: Mesh
    rank: int
    recorder: Recorder
    world: Group
    data: Group
    shard: Group
    replicate: Group
    stage: Group
    tensor: Group
    ring: Group
    ulysses: Group
    pipe_forward: Group
    pipe_backward: Group
    tied: Group
    mirror: Group
    expert: Group
    expert_across: Group
    expert_within: Group
    expert_data: Group
    expert_shard: Group
    expert_tensor: Group
    sequence: Group

    def tensor_of(self, spec: ParameterSpec) -> Group:
        """Return the ranks that hold the pieces of a parameter, where it has a dim to cut."""
        return self.tensor if spec.expert is None else self.expert_tensor

    @property
    def of_all(self) -> DataGroups:
        """Return the data-parallel groups of all parameters but routed experts."""
        return DataGroups(self.data, self.shard)

    @property
    def of_experts(self) -> DataGroups:
        """Return the data-parallel groups of routed experts."""
        return DataGroups(self.expert_data, self.expert_shard)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Say which groups a run needs besides those that every run has.

    The context ranks are cut into Ulysses groups of `ulysses_degree`, and rings across them.
    With `experts` their shares are `expert_tp` pieces of each; `expert_slices` says that they are
    cut, `expert_node` how many devices a node has where tokens reach them in two hops, `sequence`
    that ranks with tokens of the same sequences tell one another of them.
    `tied` are the places in the pipeline of the two ranks that share an embedding, `links` the
    pairs of places between which messages travel (default: neighbours).
    """

    tied: tuple[int, ...] = ()
    slices: bool = False
    stage: bool = False
    mirrored: bool = False
    ulysses_degree: int = 1
    experts: bool = False
    expert_tp: int = 1
    expert_slices: bool = False
    expert_node: int | None = None
    sequence: bool = False
    links: tuple[tuple[int, int], ...] | None = None

    @classmethod
    def by(cls, plan: Plan) -> Wanted:
        """Return what a plan needs."""
        placement = placement_of(plan)
        ends = (placement.stage_ranks[0], placement.stage_ranks[-1])
        one_each = ends[0] != ends[1] and not placement.mirrored
        between = {
            tuple(sorted((placement.rank_of(stage, one), placement.rank_of(stage + 1, one))))
            for stage in range(placement.num_stages - 1)
            for one in {0, *placement.mirrored[:1]}
        }
        two_hop = plan.layout.experts.dispatch == "two-hop"
        return cls(
            tied=ends if plan.model.tied and one_each else (),
            slices=plan.layout.zero.stage > 0,
            stage=plan.mathematics.optimizer.kind == "muon" or plan.model.experts is not None,
            experts=plan.model.experts is not None,
            expert_tp=plan.layout.experts.expert_tp,
            expert_slices=plan.model.experts is not None and plan.layout.experts.zero_stage > 0,
            expert_node=plan.cluster.devices_per_node if two_hop else None,
            sequence=plan.model.experts is not None and shares_sequences(plan),
            mirrored=bool(placement.mirrored),
            ulysses_degree=plan.layout.context.ulysses_degree,
            links=tuple(sorted((a, b) for a, b in between if a != b)),
        )


def shares_sequences(plan: Plan) -> bool:
    """Return whether ranks must know of one another's tokens of a sequence before they go on."""
    balance = plan.mathematics.balance
    return balance.counts_first or balance.capacity_factor is not None


def rank_groups(mesh: Mesh, recorder: Recorder, wanted: Wanted) -> RankGroups:
    """Make the groups of the recorder's rank; every rank must call this, with the same mesh.

    A group that is not wanted is one of this rank alone.
    """
    rank = recorder.rank

    def over(axis: str, groups: tuple[tuple[int, ...], ...]) -> Group:
        mine: tuple[int, ...] = (rank,)
        handle: dist.ProcessGroup | None = None
        for ranks in groups:
            # Every rank takes part in making every group, its own or not: torch asks for it.
            made = dist.new_group(list(ranks)) if len(ranks) > 1 else None
            if rank in ranks:
                mine, handle = ranks, cast("dist.ProcessGroup | None", made)
        return Group(axis, mine, rank, handle, recorder)

    pipes = mesh.groups(Axis.PP)
    two = wanted.tied if mesh.pp > 1 else ()
    ends = tuple(tuple(ranks[place] for place in two) for ranks in pipes if two)
    half = range(mesh.pp // 2 if wanted.mirrored else 0)
    mirrors = tuple((ranks[place], ranks[-1 - place]) for ranks in pipes for place in half)
    u, contexts = wanted.ulysses_degree, mesh.groups(Axis.CP)
    rings = tuple(ranks[place::u] for ranks in contexts for place in range(u))
    neighbours = tuple(ranks[i : i + u] for ranks in contexts for i in range(0, len(ranks), u))
    experts = _ExpertRanks.of(mesh, wanted)
    replicated = wanted.slices or wanted.expert_slices
    stage = tuple(axis for axis in MESH_AXES if axis is not Axis.PP)
    tensor = over(Axis.TP.value, mesh.groups(Axis.TP))
    groups = RankGroups(
        mesh=mesh,
        rank=rank,
        recorder=recorder,
        world=over("world", mesh.groups(*MESH_AXES)),
        data=over("dp", mesh.groups(*LOSS_AXES)),
        shard=over(Axis.DP_SHARD.value, mesh.groups(*SHARD_AXES) if wanted.slices else ()),
        replicate=over(
            Axis.DP_REPLICATE.value, mesh.groups(Axis.DP_REPLICATE) if replicated else ()
        ),
        stage=over("stage", mesh.groups(*stage) if wanted.stage else ()),
        tensor=tensor,
        ring=over(Axis.CP.value, rings),
        ulysses=over(Axis.CP.value, neighbours),
        pipe_forward=over(Axis.PP.value, pipes),
        pipe_backward=over(Axis.PP.value, pipes),
        tied=over(Axis.PP.value, ends),
        mirror=over(Axis.PP.value, mirrors),
        expert=over(Axis.EP.value, experts.folds),
        expert_across=over("ep_across", experts.across),
        expert_within=over("ep_within", experts.within),
        expert_data=over(EXPERT_DATA_AXIS, experts.copies),
        expert_shard=over(EXPERT_SHARD_AXIS, experts.slices),
        expert_tensor=tensor if wanted.expert_tp > 1 else over(Axis.TP.value, ()),
        sequence=over("sequence", mesh.groups(Axis.CP, Axis.TP) if wanted.sequence else ()),
    )
    _open(groups, wanted)
    return groups


def _open(groups: RankGroups, wanted: Wanted) -> None:
    """Open the links of groups in whose first message not all members take part."""
    for group in (groups.expert, groups.expert_across, groups.expert_within, groups.ring):
        group.open()
    if groups.mesh.pp > 1:
        links = wanted.links or tuple(pairwise(range(groups.mesh.pp)))
        groups.pipe_forward.join(links)
        groups.pipe_backward.join(links)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ExpertRanks:
    """The ranks of each group of experts; none of what is not wanted."""

    folds: _Ranks = ()
    copies: _Ranks = ()
    slices: _Ranks = ()
    across: _Ranks = ()
    within: _Ranks = ()

    @classmethod
    def of(cls, mesh: Mesh, wanted: Wanted) -> _ExpertRanks:
        """Return the groups of a mesh."""
        if not wanted.experts:
            return cls()
        held = wanted.expert_tp
        folds = mesh.expert_groups(expert_tp=held)
        nodes = [_on_nodes(fold, wanted.expert_node) for fold in folds]
        return cls(
            folds=folds,
            copies=mesh.expert_data_groups(expert_tp=held),
            slices=mesh.expert_shard_groups(expert_tp=held) if wanted.expert_slices else (),
            across=tuple(ranks for one in nodes for ranks in zip(*one, strict=True)),
            within=tuple(ranks for one in nodes for ranks in one),
        )


def _on_nodes(ranks: tuple[int, ...], devices_per_node: int | None) -> list[tuple[int, ...]]:
    """Return the ranks of each node; none where nobody asks for nodes."""
    if devices_per_node is None:
        return []
    return [tuple(one) for _, one in groupby(ranks, lambda rank: rank // devices_per_node)]
