# SPDX-License-Identifier: Apache-2.0
"""A strategy: what a guide says to do, as ranges of degrees, and the split that it comes to."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from itertools import product
from math import isqrt
from typing import Any

from echelon.core.mesh import Mesh
from echelon.core.plan import Plan, RecomputePolicy, ZeroStage
from echelon.handbook.guides.situation import Situation
from echelon.planner.predict.split_memory import GuideSplit, RankMemory

ANY = 1 << 30
"""A degree without a bound."""


@dataclass(frozen=True, slots=True)
class DegreeRange:
    """Give the least and the most that a guide allows of an axis."""

    minimum: int = 1
    maximum: int = 1

    def __contains__(self, degree: int) -> bool:
        """Return whether a degree is allowed."""
        return self.minimum <= degree <= self.maximum

    def meets(self, other: DegreeRange) -> bool:
        """Return whether some degree is allowed by both."""
        return self.minimum <= other.maximum and other.minimum <= self.maximum

    def __str__(self) -> str:
        """Return the range as people write it."""
        if self.minimum == self.maximum:
            return str(self.minimum)
        return f"{self.minimum} " + ("or more" if self.maximum == ANY else f"to {self.maximum}")


ONE = DegreeRange()
SEVERAL = DegreeRange(2, ANY)
FREE = DegreeRange(1, ANY)
AXES = ("tp", "pp", "cp", "ep")
"""The axes of which guides give degrees; data ranks are what is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """Name an advice and give what it allows: degrees, ZeRO stages, recompute.

    Data ranks take the devices that are left. `tp` stays inside of a node unless `tp_crosses`.
    """

    name: str
    zero: tuple[ZeroStage, ...] = (0,)
    tp: DegreeRange = ONE
    pp: DegreeRange = ONE
    cp: DegreeRange = ONE
    ep: DegreeRange = ONE
    tp_crosses: bool = False
    recompute: RecomputePolicy | None = None

    def differs_from(self, plan: Plan) -> tuple[str, ...]:
        """Return what a plan does otherwise, such as ``tp 8, not 1``."""
        mesh = plan.mesh
        degrees = {axis: getattr(mesh, axis) for axis in AXES}
        return self.differs(degrees, plan.layout.zero.stage if mesh.dp > 1 else None)

    def differs(self, degrees: Mapping[str, int], stage: int | None) -> tuple[str, ...]:
        """Return what degrees and a ZeRO stage are otherwise; a stage of one data rank is None."""
        found: list[str] = []
        for axis, degree in degrees.items():
            allowed = getattr(self, axis)
            if degree not in allowed:
                found.append(f"{axis} {degree}, not {allowed}")
        if stage is not None and stage not in self.zero:
            found.append(f"ZeRO {stage}, not {_stages(self.zero)}")
        return tuple(found)

    def conflicts_with(self, other: Strategy) -> tuple[str, ...]:
        """Return where no plan could follow both, such as ``tp 1 against 2 to 4``."""
        found = [
            f"{axis} {mine} against {theirs}"
            for axis in AXES
            if not (mine := getattr(self, axis)).meets(theirs := getattr(other, axis))
        ]
        if not set(self.zero) & set(other.zero):
            found.append(f"ZeRO {_stages(self.zero)} against {_stages(other.zero)}")
        return tuple(found)

    def says(self) -> str:
        """Return the strategy as degrees, those of one rank left out."""
        parts = [f"ZeRO {_stages(self.zero)}"] if self.zero != (0,) else ["no ZeRO"]
        degrees = {axis: getattr(self, axis) for axis in AXES}
        parts += [f"{axis} {degree}" for axis, degree in degrees.items() if degree != ONE]
        if self.recompute == "full":
            parts.append("full recompute")
        return ", ".join(parts)


@lru_cache(maxsize=1)
def _advice() -> dict[str, list[dict[str, Any]]]:
    path = files("echelon.handbook.guides") / "advice.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))


def degree_range(written: str | Sequence[int]) -> DegreeRange:
    """Return a range as `advice.toml` has it: a word, or the least and the most if there is one."""
    if written in ("several", "free"):
        return SEVERAL if written == "several" else FREE
    least, *most = map(int, written)
    return DegreeRange(least, *(most or [ANY]))


def _strategy(entry: Mapping[str, Any]) -> Strategy:
    degrees: Mapping[str, Any] = {a: degree_range(entry[a]) for a in AXES if a in entry}
    return Strategy(name=entry["name"], zero=tuple(entry.get("zero", (0,))), **degrees)


_READERS: Mapping[str, Callable[[Any], object]] = {
    "strategy": _strategy,
    "devices": degree_range,
    "mesh": lambda degrees: Mesh(**degrees),
    "billions": tuple,
    "lints": tuple,
    "claims": tuple,
}


def advice_rows(table: str) -> Iterator[dict[str, Any]]:
    """Yield the fields of each row of a table of `advice.toml`."""
    for row in _advice()[table]:
        yield {key: _READERS[key](v) if key in _READERS else v for key, v in row.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyOutcome:
    """Hold the split that a strategy comes to in a situation, and what its fullest rank holds."""

    split: GuideSplit
    held: RankMemory
    fits: bool


def strategy_outcome(strategy: Strategy, situation: Situation) -> StrategyOutcome | None:
    """Return the first split of a strategy that fits, or the one that holds least.

    Splits are tried in the order of what they send: ZeRO stages 0 to 2 before 3, few stages of a
    pipeline before many, few context and tensor ranks before many. None where no split of the
    strategy uses all devices of the cluster.
    """
    least: StrategyOutcome | None = None
    for split in _splits(strategy, situation):
        held = situation.held(split, strategy.recompute)
        found = StrategyOutcome(split=split, held=held, fits=held.total <= situation.memory)
        if found.fits:
            return found
        if least is None or held.total < least.held.total:
            least = found
    return least


def _splits(strategy: Strategy, situation: Situation) -> Iterator[GuideSplit]:
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
            yield GuideSplit(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, zero=zero)


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _stages(zero: tuple[ZeroStage, ...]) -> str:
    return " or ".join(map(str, zero))
