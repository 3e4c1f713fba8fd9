# SPDX-License-Identifier: Apache-2.0
"""What a machine must have before any rank starts: room for the planned bytes, and a compiler.

The planned bytes are the peaks of `cost/peak`, which `echelon plan` shows. They are compared with
the free memory of this host and its devices. Some kernels of a plan are compiled where they run.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

from echelon.config.rules.finders import plan_problems
from echelon.core.axis import Axis
from echelon.core.choices.kernels import Kernels
from echelon.core.cluster import Backend
from echelon.core.errors import EnvironmentProblem, Problem
from echelon.core.parameters import num_parameters
from echelon.core.plan import Plan, Recompute
from echelon.core.rulebook.launch import ENOUGH_MEMORY
from echelon.core.rulebook.model import KERNELS_CAN_BE_MADE
from echelon.core.units import binary_bytes, short_count
from echelon.cost.peak.rank_peak import PlaceMemory, memory_by_place
from echelon.launch.environment import COMPILER, is_launched, read_launched_rank
from echelon.launch.gpus import free_gpu_bytes
from echelon.launch.host import START_BYTES, MemoryLimit, tightest_memory_limit
from echelon.schedule.from_plan import pipeline_problems

RANK_PROCESS_BYTES = 2**26
"""Bytes of a rank's process without its tensors; measured: 41 to 75 MiB over Gloo."""
GPU_PROCESS_BYTES = 2**29
"""Least host memory of a process that drives a GPU."""
GPU_CONTEXT_BYTES = 2**29
"""Least memory of a GPU that CUDA, its libraries and NCCL take."""
OVERCOMMIT = "--allow-overcommit"
_MOST_LEANER = 2
"""Leaner plans that a problem names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Free memory of this host and of the GPU of each rank."""

    host: MemoryLimit
    gpus: Sequence[int | None] = ()
    """Free bytes of the GPU of each local rank, in order; None for an unknown GPU."""


def read_room(backend: Backend, num_ranks: int) -> Room:
    """Free memory of this host now."""
    gpus = free_gpu_bytes(num_ranks) if backend == "nccl" else ()
    return Room(host=tightest_memory_limit(), gpus=gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Bytes that the ranks of one host need together."""

    places: tuple[PlaceMemory, ...]
    process_bytes: int = RANK_PROCESS_BYTES
    """Bytes of the process of one rank."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return sum(place.num_ranks for place in self.places)

    @property
    def overhead_bytes(self) -> int:
        """Bytes of all processes without their tensors."""
        return START_BYTES + self.num_ranks * self.process_bytes

    @property
    def host_bytes(self) -> float:
        """Bytes of the host: tensors and processes."""
        planned = sum(place.num_ranks * place.host_bytes for place in self.places)
        return planned + self.overhead_bytes

    def host_sum(self) -> str:
        """Arithmetic of the bytes of the host, term by term."""
        planned = [
            f"{place.num_ranks} x {binary_bytes(place.host_bytes)} ({_terms(place.host)})"
            for place in self.places
            if place.host_bytes
        ]
        processes = f"{self.num_ranks} x {binary_bytes(self.process_bytes)} of processes"
        parts = (*planned, processes, f"{binary_bytes(START_BYTES)} of torch")
        return f"{' + '.join(parts)} = {binary_bytes(self.host_bytes)}"


def ranks_of_this_host(world_size: int) -> range:
    """Ranks of this host: all that start here or, under a launcher, the ranks up to this one.

    The last rank of a launched host counts all ranks, before any rank has reserved its memory.
    """
    if not is_launched():
        return range(world_size)
    place = read_launched_rank()
    # A launch of another size than the plan is refused by another rule.
    first, stop = place.rank - place.local_rank, place.rank + 1
    return range(min(first, world_size), min(stop, world_size))


def need_of_plan(plan: Plan, ranks: range) -> Need:
    """Need of training on the host that runs `ranks`."""
    each = RANK_PROCESS_BYTES if plan.cluster.backend == "gloo" else GPU_PROCESS_BYTES
    return Need(places=memory_by_place(plan, ranks), process_bytes=each)


def overcommitted(problems: Sequence[Problem], say: Callable[[str], None]) -> list[Problem]:
    """Report each problem of room that the user accepts; no problem remains."""
    for problem in problems:
        say(f"{problem.message}; the ranks start all the same ({OVERCOMMIT})")
    return []


def require_room(
    plan: Plan, need: Need, *, allow_overcommit: bool, say: Callable[[str], None]
) -> None:
    """Raise EnvironmentProblem if this host has no room for `need`; an overcommit is reported."""
    problems = room_problems(plan, range(need.num_ranks), need=need)
    if allow_overcommit:
        problems = overcommitted(problems, say)
    if problems:
        raise EnvironmentProblem(problems)


def room_problems(
    plan: Plan, ranks: range, room: Room | None = None, need: Need | None = None
) -> list[Problem]:
    """Problems of the memory of this host and its GPUs, if it is too small for `ranks`.

    Without `need` the ranks train `plan`. Without `room` the machine is read.
    """
    if not ranks:
        return []
    room = room or read_room(plan.cluster.backend, len(ranks))
    trains, need = need is None, need or need_of_plan(plan, ranks)
    problems = [*_gpu_problems(need, room), *_host_problems(plan, need, room, trains=trains)]
    leaner = tuple(leaner_plans(plan, ranks, room)) if problems and trains else ()
    return [
        replace(problem, suggestions=(*leaner, *problem.suggestions, OVERCOMMIT))
        for problem in problems
    ]


def _host_problems(plan: Plan, need: Need, room: Room, *, trains: bool) -> Iterator[Problem]:
    """Yield the problem of a host with less free memory than its ranks need."""
    if need.host_bytes <= room.host.free_bytes:
        return
    yield ENOUGH_MEMORY.problem(
        f"{need.num_ranks} ranks on this host would take {need.host_sum()}; {room.host.says()}",
        key="mesh",
        suggestions=(
            *(_smaller_model(plan, need, room) if trains else ()),
            f"a host with {binary_bytes(need.host_bytes)} free",
        ),
    )


def _gpu_problems(need: Need, room: Room) -> Iterator[Problem]:
    """Yield the problem of the GPU that lacks most."""
    known = [free for free in room.gpus if free is not None]
    fullest = max(need.places, key=lambda place: place.device_bytes)
    needed = fullest.device_bytes + GPU_CONTEXT_BYTES
    if not known or not fullest.device or needed <= min(known):
        return
    yield ENOUGH_MEMORY.problem(
        f"a rank would take {binary_bytes(fullest.device_bytes)} of its GPU "
        f"({_terms(fullest.device)}) + {binary_bytes(GPU_CONTEXT_BYTES)} of CUDA = "
        f"{binary_bytes(needed)}, and {binary_bytes(min(known))} of a GPU of this host is free",
        key="mesh",
        suggestions=(f"GPUs with {binary_bytes(needed)} free",),
    )


def leaner_plans(plan: Plan, ranks: range, room: Room) -> Iterator[str]:
    """Yield settings with which the plan has room here, the smallest change first."""
    num_named = 0
    for text, leaner in _changes(plan):
        size = leaner.mesh.world_size
        local = ranks if size == plan.mesh.world_size else range(size)
        if num_named < _MOST_LEANER and _is_legal(leaner) and _has_room(leaner, local, room):
            num_named += 1
            yield text


def _has_room(plan: Plan, ranks: range, room: Room) -> bool:
    need = need_of_plan(plan, ranks)
    known = [free for free in room.gpus if free is not None]
    device = max(place.device_bytes for place in need.places) + GPU_CONTEXT_BYTES
    return need.host_bytes <= room.host.free_bytes and (not known or device <= min(known))


def _is_legal(plan: Plan) -> bool:
    return not plan_problems(plan) and not pipeline_problems(plan)


def _changes(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Yield settings that may save memory, each with its plan: one change, then two."""
    layout, mesh = plan.layout, plan.mesh
    small = ("batch.microbatch_sequences = 1", replace(layout, microbatch_sequences=1))
    recomputed = ('recompute.policy = "full"', replace(layout, recompute=Recompute(policy="full")))
    both = replace(layout, microbatch_sequences=1, recompute=Recompute(policy="full"))
    changes = [
        *([small] if layout.microbatch_sequences > 1 else []),
        *([recomputed] if layout.recompute.policy != "full" else []),
        *([(f"{small[0]} with {recomputed[0]}", both)] if layout.microbatch_sequences > 1 else []),
    ]
    if plan.cluster.backend == "nccl" and layout.zero.optimizer_offload == "none":
        zero = replace(layout.zero, optimizer_offload="host")
        changes.append(('zero.optimizer_offload = "host"', replace(layout, zero=zero)))
    if plan.cluster.backend == "gloo":
        # All replicas of a host hold their copies of the model in the same memory.
        for axis in (Axis.DP_REPLICATE, Axis.CP):
            degree = mesh.degree(axis)
            for fewer in (number for number in range(degree - 1, 0, -1) if degree % number == 0):
                changed = replace(layout, mesh=replace(mesh, **{axis.value: fewer}))
                changes.append((f"mesh.{axis.value} = {fewer}", changed))
    for text, changed in changes:
        yield text, replace(plan, layout=changed)


def _smaller_model(plan: Plan, need: Need, room: Room) -> Iterator[str]:
    """Yield the size of a model that has room, if bytes grow with its parameters."""
    planned = need.host_bytes - need.overhead_bytes
    left = room.host.free_bytes - need.overhead_bytes
    if plan.cluster.backend == "gloo" and left > 0:
        size = num_parameters(plan.model) * left / planned
        yield f"a model of about {short_count(size)} parameters or less"


def _terms(terms: Mapping[str, float]) -> str:
    """Terms as text, the largest first."""
    ordered = sorted(terms.items(), key=lambda term: -term[1])
    return ", ".join(f"{name} {binary_bytes(size)}" for name, size in ordered)


def require_kernels(
    kernels: Kernels,
    backend: Backend,
    *,
    set_by: str = "",
    environment: Mapping[str, str] = os.environ,
) -> None:
    """Raise EnvironmentProblem where what makes the kernels of a plan is not installed here."""
    missing, way = "", ""
    if kernels.provider != "plain" and backend == "nccl":
        if find_spec("triton") is None:
            missing = "the package triton, which cannot be found"
            way = "the torch from PyPI, whose builds for CUDA bring it"
    elif kernels.provider == "compiled":
        compiler = cpp_compiler(environment)
        if shutil.which(compiler) is None:
            missing = f"a C++ compiler, and there is no {compiler}"
            way = f"install g++, or set {COMPILER} to the compiler that is there"
    if missing:
        raise EnvironmentProblem(
            KERNELS_CAN_BE_MADE.problem(
                f'kernels.provider = "{kernels.provider}" needs {missing}',
                key="kernels.provider",
                set_by=set_by,
                suggestions=('kernels.provider = "plain"', way),
            )
        )


def cpp_compiler(environment: Mapping[str, str]) -> str:
    """Return the compiler that PyTorch calls: $CXX, or what the system usually has."""
    return environment.get(COMPILER) or ("clang++" if sys.platform == "darwin" else "g++")
