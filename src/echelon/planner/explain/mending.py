"""Changes that make a plan hold less: what an engineer tries where it does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from echelon.planner.choice import Choice
from echelon.planner.choices import MOST_APART, MOST_STAGE
from echelon.planner.explain.moves import recounted, with_degree, with_recompute, with_stage
from echelon.planner.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Mending:
    """Name a change, with the plan after it."""

    name: str
    choice: Choice


def mendings(request: Request, choice: Choice) -> Iterator[Mending]:
    """Yield every change of a plan that may make it hold less; some may not be legal."""
    mesh = choice.mesh
    for every in range(MOST_APART, 0, -1):
        if not choice.recompute or every < choice.recompute:
            name = "recompute every block" if every == 1 else f"recompute every {every} blocks"
            yield Mending(name=name, choice=with_recompute(request, choice, every))
    if mesh.dp * mesh.cp > 1:
        for stage in range(choice.zero + 1, MOST_STAGE + 1):
            name = f"ZeRO {choice.zero} -> {stage}"
            yield Mending(name=name, choice=with_stage(choice, stage))
        if mesh.dp_replicate > 1 and choice.zero > 0:
            whole = replace(mesh, dp_replicate=1, dp_shard=mesh.dp)
            name = f"shards over all {mesh.dp} data ranks"
            yield Mending(name=name, choice=replace(choice, mesh=whole))
    size = choice.microbatch
    while size % 2 == 0:
        size //= 2
        smaller = recounted(request, replace(choice, microbatch=size))
        yield Mending(name=f"microbatch {choice.microbatch} -> {size}", choice=smaller)
    if mesh.tp > 1 and not choice.sequence_parallel:
        yield Mending(name="sequence parallel", choice=replace(choice, sequence_parallel=True))
    if mesh.pp > 1 and choice.schedule != "1f1b":
        plain = replace(choice, schedule="1f1b", virtual=1)
        yield Mending(name=f"{choice.schedule} -> 1f1b", choice=plain)
    yield from _degrees(request, choice)
    if not choice.offload:
        home = replace(choice, offload=True)
        staged = home if choice.zero else with_stage(home, 1)
        yield Mending(name="optimizer state to the host", choice=staged)


def on_more_devices(request: Request, choice: Choice, times: int) -> Iterator[Mending]:
    """Yield the plan over so many times the devices, each axis in turn so much longer."""
    mesh = choice.mesh
    for axis, name in (("dp_shard", "dp"), ("tp", "tp"), ("pp", "pp"), ("cp", "cp")):
        more = replace(mesh, **{axis: times * getattr(mesh, axis)})
        longer = _with_streams(recounted(request, replace(choice, mesh=more)), mesh.tp)
        text = f"devices x{times} as {name} {getattr(mesh, name)} -> {times * getattr(mesh, name)}"
        yield Mending(name=text, choice=longer)


def _degrees(request: Request, choice: Choice) -> Iterator[Mending]:
    for axis in ("tp", "pp", "cp"):
        now = getattr(choice.mesh, axis)
        for times in (2, 4, 8):
            found = with_degree(request, choice, axis, times * now)
            if isinstance(found, Choice):
                longer = _with_streams(found, choice.mesh.tp)
                yield Mending(name=f"{axis} {now} -> {times * now}", choice=longer)


def _with_streams(choice: Choice, tp: int) -> Choice:
    """Return a plan that got tensor ranks with sequence parallelism, as a run has by itself."""
    begins = tp == 1 and choice.mesh.tp > 1
    return replace(choice, sequence_parallel=choice.sequence_parallel or begins)
