"""The cheapest changes of a request under whose pins nothing fits.

A pin is freed, everything else that is pinned stays, and the best plan then says what the pin would
have to be; pairs of pins where no single one is enough. Beside that optimizer state goes to the
host, or the same pins go over more of the same devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from echelon.planner.choice import Choice
from echelon.planner.explain.bands import difference
from echelon.planner.explain.fixes import Fix
from echelon.planner.explain.what_if import with_devices, with_memory
from echelon.planner.pins import Pins
from echelon.planner.ranked import Ranked, estimate_choice, settings_of
from echelon.planner.request import Request
from echelon.planner.sweep import Sweep

ENDLESS = 1e18
NEARLY = (1.0, 1.05, 1.25, 2.0, 4.0)
"""Times the bound of the leanest plan under which the leanest is looked for."""
MOST_DOUBLINGS = 6
MOST_FREED = 2


def cheapest_fix(request: Request) -> tuple[Fix, ...]:
    """Return what makes something fit under the pins, the cheapest first; nothing where it does.

    Bytes saved are those beside the leanest plan that the pins leave, seconds lost beside the
    fastest, if memory were no matter.
    """
    if _best(request) is not None:
        return ()
    lean, fast = _leanest(request), _best(with_memory(request, ENDLESS))
    if lean is None or fast is None:
        return ()
    found = [
        _fix(request, lean, fast, changes, other, choice)
        for changes, other, choice in (*_freed(request), *_offloaded(request), *_larger(request))
    ]
    return tuple(sorted(found, key=lambda fix: (fix.devices, fix.untimed, fix.estimate.step_s)))


def _freed(request: Request) -> Iterator[tuple[tuple[str, ...], Request, Choice]]:
    """Yield the best plan without each pin, or without each two."""
    names = [name for name in request.pins.values if name != "devices"]
    for count in range(1, MOST_FREED + 1):
        some = False
        for freed in combinations(names, count):
            pins = request.pins
            for name in freed:
                pins = pins.without(name)
            choice = _best(_pinned(request, pins))
            if choice is not None:
                some = True
                changes = tuple(
                    f"{request.pins.texts[name]} -> {pinned_value(choice, name)}" for name in freed
                )
                yield changes, request, choice
        if some:
            return


def _offloaded(request: Request) -> Iterator[tuple[tuple[str, ...], Request, Choice]]:
    if request.pins.of("offload") is None:
        choice = _best(request, offload=True)
        if choice is not None:
            yield ("optimizer state to the host",), request, choice


def _larger(request: Request) -> Iterator[tuple[tuple[str, ...], Request, Choice]]:
    """Yield the plan of the smallest doubling of the cluster on which something fits."""
    count = request.cluster.num_devices
    for _ in range(MOST_DOUBLINGS):
        count *= 2
        larger = with_devices(_pinned(request, request.pins.without("devices")), count)
        if larger is None:
            return
        choice = _best(larger)
        if choice is not None:
            yield (f"{request.cluster.num_devices:,} -> {count:,} devices",), larger, choice
            return


def _fix(
    request: Request,
    lean: Choice,
    fast: Choice,
    changes: Sequence[str],
    other: Request,
    choice: Choice,
) -> Fix:
    before, quickest = estimate_choice(request, lean), estimate_choice(request, fast)
    after = estimate_choice(other, choice)
    lost = difference(quickest, after)
    one = Ranked(choice=choice, estimate=after, simulated=False)
    return Fix(
        changes=tuple(changes),
        choice=choice,
        settings=settings_of(other, one),
        estimate=after,
        saved_bytes=before.bytes_held - after.bytes_held,
        lost_s=lost,
        lost_share=lost.value / quickest.step_s,
        devices=choice.devices,
        untimed=choice.offload and not lean.offload,
    )


def _leanest(request: Request) -> Choice | None:
    """Return the fastest of the plans that hold about the least."""
    sweep = _walked(with_memory(request, 1.0))
    for times in NEARLY:
        choice = _best(with_memory(request, times * sweep.least_bytes + 1.0))
        if choice is not None:
            return choice
    return None


def _best(request: Request, *, offload: bool = False) -> Choice | None:
    ranked = _walked(request, offload=offload).best.ranked()
    return ranked[0].choice() if ranked else None


def _walked(request: Request, *, offload: bool = False) -> Sweep:
    """Return a sweep over all devices, or the pinned number."""
    sweep = Sweep(request, offload=offload, keep=1)
    pinned = request.pins.of("devices")
    sweep.walk(int(pinned[0]) if pinned else request.cluster.num_devices)
    return sweep


def _pinned(request: Request, pins: Pins) -> Request:
    return replace(request, pins=pins)


def pinned_value(choice: Choice, name: str) -> str:
    """Return what a plan has of something that can be pinned, as a pin says it."""
    mesh = choice.mesh
    if name == "recompute":
        every = choice.recompute
        return {0: "none", 1: "full"}.get(every, f"full/{every}")
    words = {
        "sequence_parallel": "on" if choice.sequence_parallel else "off",
        "offload": "host" if choice.offload else "none",
        "reshard": "always" if choice.reshard else "never",
        "dp": str(mesh.dp),
    }
    holder = mesh if hasattr(mesh, name) else choice
    return words.get(name) or str(getattr(holder, name))
