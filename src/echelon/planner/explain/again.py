"""Search again, for a question about an answer: quickly, and timed as the answer's plans were.

Where the space of the answer is large, only what is near its best plan is walked: degrees and
microbatches of at most NEAR times as many or as few, every schedule, every way to share out, every
recompute. `Found.near` says which of the two it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from echelon.core.errors import ConfigError, Problem
from echelon.planner.choice import Choice
from echelon.planner.pins import Pins
from echelon.planner.ranked import Ranked, by_events, estimate_choice, worth
from echelon.planner.request import Request
from echelon.planner.search import Answer, worlds_of
from echelon.planner.simulated import (
    num_actions,
)
from echelon.planner.sweep import Sweep

LARGE = 500_000
"""Legal plans from which on only the neighbourhood of the best is walked again."""
NEAR = 2
MOST_ACTIONS = 25_000
"""Actions that are timed for one plan; with more it keeps its closed form."""
KEPT = 6
ACTIONS_TOGETHER = 25_000
"""Actions that are timed in one search, beside those of plans that were timed before."""
CLOSE = 0.1
"""By how much slower a plan is, by closed forms, whose events nobody needs to time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Hold the best plan of another search; none where nothing is legal, or nothing fits."""

    best: Ranked | None
    near: bool
    seen: int
    refused: Mapping[str, int]
    least_bytes: float


class Again:
    """Search and time plans of one model and batch on one cluster; each plan is timed once."""

    def __init__(self, answer: Answer, request: Request) -> None:
        """Keep the answer in question, and a request that differs from it in something."""
        assert answer.best is not None
        self.request = request
        self.near = answer.seen > LARGE
        self._best = answer.best.choice
        self._offload = answer.offload
        self._closed: dict[Choice, Ranked] = {}
        self._timed: dict[Choice, Ranked] = {}

    def search(self, pins: Pins | None = None, *, among: Sequence[Choice] = ()) -> Found:
        """Return the best plan under `pins`; plans of `among` that fit are looked at too."""
        request = replace(self.request, pins=pins or self.request.pins)
        if self.near:
            request = replace(request, pins=near_pins(request.pins, self._best))
        sweep = Sweep(request, offload=self._offload, keep=KEPT)
        for world in worlds_of(request):
            sweep.walk(world)
            if request.objective == "devices" and sweep.best.found:
                break
        return Found(
            best=self._first(among, (one.choice() for one in sweep.best.ranked())),
            near=self.near,
            seen=sweep.counts.seen,
            refused=dict(sweep.counts.refused),
            least_bytes=sweep.least_bytes,
        )

    def closed(self, choice: Choice) -> Ranked:
        """Return what a plan takes by closed forms."""
        if choice not in self._closed:
            estimate = estimate_choice(self.request, choice)
            self._closed[choice] = Ranked(choice=choice, estimate=estimate, simulated=False)
        return self._closed[choice]

    def timed(self, choice: Choice) -> Ranked:
        """Return what a plan takes, event by event where that is short."""
        if choice.mesh.pp == 1 or num_actions(choice) > MOST_ACTIONS:
            return self.closed(choice)
        if choice not in self._timed:
            self._timed[choice] = by_events(self.request, self.closed(choice))
        return self._timed[choice]

    def alike(self, best: Ranked, other: Ranked) -> tuple[Ranked, Ranked]:
        """Return two plans timed in the same way: by closed forms where one has no events."""
        if best.choice.mesh.pp == 1 or other.choice.mesh.pp == 1:
            return best, other
        if best.simulated == other.simulated:
            return best, other
        return self.closed(best.choice), self.closed(other.choice)

    def close(self, best: Ranked, other: Choice) -> bool:
        """Return whether closed forms leave open which of two plans is faster."""
        least = (1.0 + CLOSE) * self.closed(best.choice).estimate.step_s
        return self.closed(other).estimate.step_s < least

    def fits(self, choice: Choice) -> bool:
        """Return whether the fullest rank of a plan has enough memory."""
        return self.closed(choice).estimate.bytes_held <= self.request.memory_bytes

    def problems(self, choice: Choice) -> tuple[Problem, ...]:
        """Return what the rules of a run say against a plan; nothing where it is legal."""
        return problems_of(self.request, choice)

    def _first(self, among: Sequence[Choice], others: Iterable[Choice]) -> Ranked | None:
        """Return the best of the plans that fit: `among`, then the others by closed forms.

        Only plans that were timed in the same way are compared, so what is left untimed drops out.
        """
        closed = sorted((self.closed(one) for one in others if self.fits(one)), key=self._worth)
        order = dict.fromkeys((*filter(self.fits, among), *(one.choice for one in closed)))
        left, found = ACTIONS_TOGETHER, list[Ranked]()
        for choice in order:
            known = choice in self._timed or choice.mesh.pp == 1
            count = 0 if known else num_actions(choice)
            if count <= left or not found:
                left -= count
                found.append(self.timed(choice))
        return min(found, key=self._worth, default=None)

    def _worth(self, one: Ranked) -> float:
        return worth(self.request, one.estimate)


def problems_of(request: Request, choice: Choice) -> tuple[Problem, ...]:
    """Return what the rules of a run say against a plan; nothing where it is legal.

    Blocks are cut evenly: no rule asks for how well they balance, and that takes long.
    """
    settings = choice.settings(has_experts=request.model.experts is not None)
    if choice.mesh.pp > 1:
        settings["pipeline.stages"] = "even"
    try:
        request.job(settings)
    except ConfigError as error:
        return tuple(error.problems)
    return ()


def near_pins(pins: Pins, choice: Choice) -> Pins:
    """Return pins to what is near a plan, beside those that there are."""
    mesh = choice.mesh
    degrees = {"tp": mesh.tp, "pp": mesh.pp, "cp": mesh.cp, "ep": mesh.ep}
    for name, value in {**degrees, "microbatch": choice.microbatch}.items():
        if pins.of(name) is None:
            close = {value, value * NEAR, value // NEAR if value % NEAR == 0 else value}
            pins = pins.having(name, *sorted(close))
    if pins.of("context") is None:
        pins = pins.having("context", *sorted({choice.context, "ring"}))
    if pins.of("expert_tp") is None:
        pins = pins.having("expert_tp", *sorted({1, choice.expert_tp}))
    return pins
