"""The one place where a Mesh becomes process groups."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch.distributed as dist

from echelon.core.axis import LOSS_AXES, MESH_AXES, SHARD_AXES, Axis
from echelon.core.mesh import Mesh
from echelon.core.plan import Plan
from echelon.parallel.collectives import Group
from echelon.parallel.recorder import Recorder
from echelon.schedule.of_plan import placement_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroups:
    """Hold the groups of one rank.

    `data` sums losses and gradients (dp_replicate x dp_shard x cp); `shard` (dp_shard x cp) cuts
    slices of which `replicate` ranks hold copies; `stage` is all ranks of one pipeline stage, which
    share out Muon's matrices. `tensor` is `tp`. `ring` and `ulysses` are the two parts of `cp`
    (`core.placement`): the neighbours of a `ulysses` group exchange heads. Activations travel on
    `pipe_forward` and gradients on `pipe_backward`: one communicator each, because NCCL runs the
    messages of a communicator in order and the two directions would wait for each other. `tied`
    joins the ranks of the first and the last stage where both hold the embedding, `mirror` two
    ranks that hold copies of the same stages; `world` carries the few numbers of a step that every
    rank needs.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Say which groups a run needs besides those that every run has.

    The context ranks are cut into Ulysses groups of `ulysses_degree`, and rings across them.
    `tied` are the places in the pipeline of the two ranks that share an embedding, `links` the
    pairs of places between which messages travel (default: neighbours).
    """

    tied: tuple[int, ...] = ()
    slices: bool = False
    stage: bool = False
    mirrored: bool = False
    ulysses_degree: int = 1
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
        return cls(
            tied=ends if plan.model.tied and one_each else (),
            slices=plan.layout.zero.stage > 0,
            stage=plan.mathematics.optimizer.kind == "muon",
            mirrored=bool(placement.mirrored),
            ulysses_degree=plan.layout.context.ulysses_degree,
            links=tuple(sorted((a, b) for a, b in between if a != b)),
        )


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
    stage = tuple(axis for axis in MESH_AXES if axis is not Axis.PP)
    groups = RankGroups(
        mesh=mesh,
        rank=rank,
        recorder=recorder,
        world=over("world", mesh.groups(*MESH_AXES)),
        data=over("dp", mesh.groups(*LOSS_AXES)),
        shard=over(Axis.DP_SHARD.value, mesh.groups(*SHARD_AXES) if wanted.slices else ()),
        replicate=over(
            Axis.DP_REPLICATE.value, mesh.groups(Axis.DP_REPLICATE) if wanted.slices else ()
        ),
        stage=over("stage", mesh.groups(*stage) if wanted.stage else ()),
        tensor=over(Axis.TP.value, mesh.groups(Axis.TP)),
        ring=over(Axis.CP.value, rings),
        ulysses=over(Axis.CP.value, neighbours),
        pipe_forward=over(Axis.PP.value, pipes),
        pipe_backward=over(Axis.PP.value, pipes),
        tied=over(Axis.PP.value, ends),
        mirror=over(Axis.PP.value, mirrors),
    )
    groups.ring.open()
    if mesh.pp > 1:
        links = wanted.links or tuple(pairwise(range(mesh.pp)))
        groups.pipe_forward.join(links)
        groups.pipe_backward.join(links)
    return groups
