"""A strategy: what a guide says to do, as ranges of degrees, and the split that it comes to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import product
from math import isqrt

from echelon.core.plan import Plan, RecomputePolicy, ZeroStage
from echelon.planner.guides.memory import RankMemory, Split
from echelon.planner.guides.situation import Situation

ANY = 1 << 30
"""A degree without a bound."""


@dataclass(frozen=True, slots=True)
class Degrees:
    """Give the least and the most that a guide allows of an axis."""

    least: int = 1
    most: int = 1

    def __contains__(self, degree: int) -> bool:
        """Return whether a degree is allowed."""
        return self.least <= degree <= self.most

    def meets(self, other: Degrees) -> bool:
        """Return whether some degree is allowed by both."""
        return self.least <= other.most and other.least <= self.most

    def __str__(self) -> str:
        """Return the range as people write it."""
        if self.least == self.most:
            return str(self.least)
        return f"{self.least} or more" if self.most == ANY else f"{self.least} to {self.most}"


ONE = Degrees()
SEVERAL = Degrees(2, ANY)
FREE = Degrees(1, ANY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """Name an advice and give what it allows: degrees, ZeRO stages, recompute.

    Data ranks take the devices that are left. `tp` stays inside of a node unless `tp_crosses`.
    """

    name: str
    zero: tuple[ZeroStage, ...] = (0,)
    tp: Degrees = ONE
    pp: Degrees = ONE
    cp: Degrees = ONE
    ep: Degrees = ONE
    tp_crosses: bool = False
    recompute: RecomputePolicy | None = None

    def differs_from(self, plan: Plan) -> tuple[str, ...]:
        """Return what a plan does otherwise, such as ``tp 8, not 1``."""
        mesh = plan.mesh
        found = [
            f"{axis} {degree}, not {allowed}"
            for axis, degree, allowed in (
                ("tp", mesh.tp, self.tp),
                ("pp", mesh.pp, self.pp),
                ("cp", mesh.cp, self.cp),
                ("ep", mesh.ep, self.ep),
            )
            if degree not in allowed
        ]
        if plan.layout.zero.stage not in self.zero and mesh.dp > 1:
            found.append(f"ZeRO {plan.layout.zero.stage}, not {_stages(self.zero)}")
        return tuple(found)

    def conflicts_with(self, other: Strategy) -> tuple[str, ...]:
        """Return where no plan could follow both, such as ``tp 1 against 2 to 4``."""
        found = [
            f"{axis} {mine} against {theirs}"
            for axis, mine, theirs in (
                ("tp", self.tp, other.tp),
                ("pp", self.pp, other.pp),
                ("cp", self.cp, other.cp),
                ("ep", self.ep, other.ep),
            )
            if not mine.meets(theirs)
        ]
        if not set(self.zero) & set(other.zero):
            found.append(f"ZeRO {_stages(self.zero)} against {_stages(other.zero)}")
        return tuple(found)

    def says(self) -> str:
        """Return the strategy as degrees, those of one rank left out."""
        parts = [f"ZeRO {_stages(self.zero)}"] if self.zero != (0,) else ["no ZeRO"]
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Degrees) and value != ONE:
                parts.append(f"{field.name} {value}")
        if self.recompute == "full":
            parts.append("full recompute")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Hold the split that a strategy comes to in a situation, and what its fullest rank holds."""

    split: Split
    held: RankMemory
    fits: bool


def outcome(strategy: Strategy, situation: Situation) -> Outcome | None:
    """Return the first split of a strategy that fits, or the one that holds least.

    Splits are tried in the order of what they send: ZeRO stages 0 to 2 before 3, few stages of a
    pipeline before many, few context and tensor ranks before many. None where no split of the
    strategy uses all devices of the cluster.
    """
    least: Outcome | None = None
    for split in _splits(strategy, situation):
        held = situation.held(split, strategy.recompute)
        found = Outcome(split=split, held=held, fits=held.total <= situation.memory)
        if found.fits:
            return found
        if least is None or held.total < least.held.total:
            least = found
    return least


def _splits(strategy: Strategy, situation: Situation) -> Iterator[Split]:
    model, devices = situation.model, situation.num_devices
    node = devices if strategy.tp_crosses else situation.domain
    experts = model.experts.num_experts if model.experts is not None else 1
    degrees = _divisors(devices)
    for zero, pp, cp, tp in product(
        strategy.zero,
        (d for d in degrees if d in strategy.pp and d <= model.layers),
        (d for d in degrees if d in strategy.cp and situation.positions % d == 0),
        (d for d in degrees if d in strategy.tp and d <= node and model.heads % d == 0),
    ):
        others = pp * cp * tp
        dp = devices // others
        if devices % others or dp * situation.microbatch_sequences > situation.global_sequences:
            continue
        wanted = (d for d in _divisors(dp * cp * tp) if d in strategy.ep and experts % d == 0)
        for ep in wanted:
            yield Split(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, zero=zero)


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _stages(zero: tuple[ZeroStage, ...]) -> str:
    return " or ".join(map(str, zero))
