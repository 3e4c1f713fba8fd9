"""The meshes nearest to a wrong one that do work: what an error about the world size suggests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import log2, prod

from echelon.config.checks import CHECKS, run_checks
from echelon.config.cluster import smallest_cluster
from echelon.config.effects import EFFECTS
from echelon.config.entries import Entry
from echelon.config.view import View, mesh_of
from echelon.core.axis import MESH_AXES
from echelon.core.cluster import Cluster
from echelon.core.errors import Problem
from echelon.core.mesh import Mesh
from echelon.core.rulebook.mesh import FITS_CLUSTER, WORLD_SIZE_IS_PRODUCT
from echelon.core.rules import nearest_divisors


def nearest_meshes(view: View, world_size: int, *, limit: int = 4) -> tuple[str, ...]:
    """Return up to `limit` legal settings of the mesh with this many ranks, nearest first."""
    axes = _axes(view)
    now = mesh_of(view)
    degrees_now = tuple(int(getattr(now, axis)) for axis in axes)
    fixed = now.world_size // prod(degrees_now)
    if world_size % fixed:
        return ()
    changes = sorted(
        _factorings(world_size // fixed, len(axes)),
        key=lambda degrees: (_distance(degrees_now, degrees), degrees),
    )
    found: list[str] = []
    for degrees in changes:
        changed = dict(zip(axes, degrees, strict=True))
        if _is_legal(view, changed):
            found.append(" x ".join(f"{axis} {degree}" for axis, degree in changed.items()))
            if len(found) == limit:
                break
    return tuple(found)


def _axes(view: View) -> tuple[str, ...]:
    """Return the axes that another mesh may split; dp_shard and cp where they cut something."""
    cut = view.integer("zero.stage") or view.integer("mesh.ep") > 1
    shard = ("dp_shard",) if cut else ()
    context = ("cp",) if view.integer("mesh.cp") > 1 else ()
    return ("pp", "dp_replicate", *shard, *context, "tp")


def world_size_problems(view: View, world_size: int | None) -> Iterator[Problem]:
    """Yield the problem of a launcher that started another number of ranks than the mesh has."""
    mesh = mesh_of(view)
    if world_size is None or world_size == mesh.world_size:
        return
    yield WORLD_SIZE_IS_PRODUCT.problem(
        f"{world_size} ranks were started, but {product_text(mesh)}",
        key="mesh",
        set_by=_mesh_set_by(view),
        works=(*nearest_meshes(view, world_size), f"{mesh.world_size} ranks"),
    )


def cluster_problems(view: View, cluster: Cluster) -> Iterator[Problem]:
    """Yield the problem of more ranks than the cluster has devices."""
    mesh = mesh_of(view)
    if mesh.world_size <= cluster.num_devices:
        return
    yield FITS_CLUSTER.problem(
        f"{product_text(mesh)} ranks, but {cluster.name} has {cluster.num_devices} devices",
        key="mesh",
        set_by=_mesh_set_by(view),
        works=(
            *nearest_meshes(view, cluster.num_devices),
            *_bigger_cluster(view, mesh.world_size),
        ),
    )


def _bigger_cluster(view: View, num_devices: int) -> Iterator[str]:
    if view.has("cluster.preset"):
        name = smallest_cluster(view.word("cluster.preset"), num_devices)
        yield f'cluster.preset = "{name}"'


def product_text(mesh: Mesh) -> str:
    """Return the degrees of a mesh and their product, in words."""
    degrees = " x ".join(f"{axis.value} {mesh.degree(axis)}" for axis in MESH_AXES)
    return f"the mesh is {degrees} = {mesh.world_size}"


def _mesh_set_by(view: View) -> str:
    return view.set_by(*(f"mesh.{axis.value}" for axis in MESH_AXES))


def _factorings(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to write `number` as a product of `count` degrees, in order."""
    if count == 1:
        yield (number,)
        return
    for first in nearest_divisors(number, 1, limit=number):
        for rest in _factorings(number // first, count - 1):
            yield first, *rest


def _distance(now: tuple[int, ...], degrees: tuple[int, ...]) -> tuple[float, int]:
    steps = [abs(log2(new / old)) for new, old in zip(degrees, now, strict=True)]
    return round(sum(steps), 6), sum(step > 0 for step in steps)


def _is_legal(view: View, degrees: dict[str, int]) -> bool:
    entries = dict(view.entries)
    for axis, degree in degrees.items():
        entries[f"mesh.{axis}"] = Entry(value=degree, source="")
    return not run_checks(replace(view, entries=entries), (*CHECKS, *EFFECTS))
