# SPDX-License-Identifier: Apache-2.0
"""How many ranks a mesh has: as many as were started, and no more than there are devices."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from math import log2, prod

from echelon.config.cluster.settings import cluster_of, smallest_cluster
from echelon.config.rules.suggestions import Trial
from echelon.config.rules.violations import RuleViolation, ViolationFinder
from echelon.config.settings.servers import COUNT_KEY
from echelon.config.view import View, mesh_of
from echelon.core.axis import MESH_AXES
from echelon.core.mesh import Mesh
from echelon.core.rulebook.launch import TF_CONFIG_SERVERS
from echelon.core.rulebook.mesh import FITS_CLUSTER, WORLD_SIZE_IS_PRODUCT
from echelon.core.rules import nearest_divisors

MOST_MESHES = 4  # meshes in a message
MESH_KEYS = tuple(f"mesh.{axis.value}" for axis in MESH_AXES)


def world_size_is_product(world_size: int) -> ViolationFinder:
    """Return what finds a mesh of another number of ranks than a launcher has started."""

    def find(view: View) -> Iterator[RuleViolation]:
        mesh = mesh_of(view)
        if world_size != mesh.world_size:
            yield RuleViolation(
                rule=WORLD_SIZE_IS_PRODUCT,
                key="mesh",
                message=f"{world_size} ranks were started, but {mesh_product_text(mesh)}",
                set_by=MESH_KEYS,
                suggestions=(
                    lambda trial: suggest_meshes(trial, world_size),
                    f"{mesh.world_size} ranks",
                ),
            )

    return find


def servers_are_ps_tasks(tasks: int, world_size: int) -> ViolationFinder:
    """Return what finds another number of servers than TF_CONFIG has started as such."""

    def find(view: View) -> Iterator[RuleViolation]:
        count = view.integer(COUNT_KEY)
        if count != tasks:
            yield RuleViolation(
                rule=TF_CONFIG_SERVERS,
                key=COUNT_KEY,
                message=f"TF_CONFIG has {tasks} ps tasks and {world_size - tasks} others, but "
                f"{COUNT_KEY} = {count}",
                set_by=(COUNT_KEY,),
                suggestions=(f"{COUNT_KEY} = {tasks}", f"{count} ps tasks"),
            )

    return find


def mesh_fits_cluster(view: View) -> Iterator[RuleViolation]:
    """Find more ranks than the cluster has devices."""
    mesh, cluster = mesh_of(view), cluster_of(view)
    if mesh.world_size > cluster.num_devices:
        yield RuleViolation(
            rule=FITS_CLUSTER,
            key="mesh",
            message=f"{mesh_product_text(mesh)} ranks, but {cluster.name} has "
            f"{cluster.num_devices} devices",
            set_by=MESH_KEYS,
            suggestions=(
                lambda trial: suggest_meshes(trial, cluster.num_devices),
                *_bigger_cluster(view, mesh.world_size),
            ),
        )


def suggest_meshes(trial: Trial, world_size: int) -> Iterator[str]:
    """Yield legal settings of the mesh with this many ranks, nearest first."""
    axes, now = _axes(trial.view), mesh_of(trial.view)
    degrees_now = tuple(int(getattr(now, axis)) for axis in axes)
    ranks, rest = divmod(world_size - now.servers, now.num_workers // prod(degrees_now))
    if rest or ranks < 1:
        return
    nearest = sorted(
        _factorizations(ranks, len(axes)),
        key=lambda degrees: (_distance(degrees_now, degrees), degrees),
    )
    meshes = (dict(zip(axes, degrees, strict=True)) for degrees in nearest)
    legal = (
        mesh for mesh in meshes if trial.is_legal({f"mesh.{axis}": n for axis, n in mesh.items()})
    )
    for mesh in islice(legal, MOST_MESHES):
        yield " x ".join(f"{axis} {degree}" for axis, degree in mesh.items())


def _axes(view: View) -> tuple[str, ...]:
    """Return the axes that another mesh may split; dp_shard and cp where they cut something."""
    cut = view.integer("zero.stage") or view.integer("mesh.ep") > 1
    shard = ("dp_shard",) if cut else ()
    context = ("cp",) if view.integer("mesh.cp") > 1 else ()
    return ("pp", "dp_replicate", *shard, *context, "tp")


def _bigger_cluster(view: View, num_devices: int) -> Iterator[str]:
    if view.has("cluster.preset"):
        name = smallest_cluster(view.word("cluster.preset"), num_devices)
        yield f'cluster.preset = "{name}"'


def mesh_product_text(mesh: Mesh) -> str:
    """Return the degrees of a mesh and their product, in words."""
    degrees = " x ".join(f"{axis.value} {mesh.degree(axis)}" for axis in MESH_AXES)
    servers = f" + {mesh.servers} servers" * (mesh.servers > 0)
    return f"the mesh is {degrees}{servers} = {mesh.world_size}"


def _factorizations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to write `number` as a product of `count` degrees, in order."""
    if count == 1:
        yield (number,)
        return
    for first in nearest_divisors(number, 1, limit=number):
        for rest in _factorizations(number // first, count - 1):
            yield first, *rest


def _distance(now: tuple[int, ...], degrees: tuple[int, ...]) -> tuple[float, int]:
    steps = [abs(log2(new / old)) for new, old in zip(degrees, now, strict=True)]
    return round(sum(steps), 6), sum(step > 0 for step in steps)
