# SPDX-License-Identifier: Apache-2.0
"""Local SGD: islands of ranks that train alone and meet once in a round of H steps.

An island is one coordinate of `dp_replicate`: a whole mesh of the other axes, with parameters and
optimizer state of its own. After H inner steps its outer gradient is what it moved away from the
parameters that all islands last agreed on, and the mean of these is a step of an outer optimizer
(Stich, "Local SGD Converges Fast and Communicates Little", 2018: averaging, which is plain SGD of
rate 1; Douillard et al., "DiLoCo", 2023, algorithm 1: Nesterov). In Streaming DiLoCo (Douillard et
al., 2025) fragments of the model meet in steps of their own, and what comes of a meeting is applied
some steps later, so that it travels while islands go on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from echelon.core.settings.configured import Configured
from echelon.core.settings.value_types import FROM_ZERO, Integer, Real

OuterOptimizerKind = Literal["sgd", "nesterov"]
OuterGradients = Literal["fp32", "int8", "fp8"]
AllIslands = Literal["all"]

OUTER_BLOCK = 128
"""Consecutive numbers of a parameter, row by row, that share a scale in 8 bits."""

DEFAULT_RESTARTS = 1
"""Times that each lost island is started again, where nobody says."""

LATE_MERGE = 0.5
"""Share of an island's own parameters in what it goes on with, where an outer step comes late: the
merge of Streaming DiLoCo (section 2.3), whose islands differ by less than they moved meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSgd:
    """Say how often islands meet, and what they make of it; the default is that all always do."""

    every: Annotated[
        int, Configured("steps that replicas train alone between meetings; 0: none", FROM_ZERO)
    ] = 0
    """H: steps of a round; 0 where gradients are summed over all ranks in each step."""
    islands: Annotated[
        int,
        Configured(
            "replicas that train alone: dp_replicate", Integer(words=("auto",)), default="auto"
        ),
    ] = 1
    """Islands, each of which is a coordinate of `dp_replicate`."""
    outer: Annotated[
        OuterOptimizerKind,
        Configured("the step from the mean of what islands moved", default="nesterov"),
    ] = "sgd"
    outer_learning_rate: Annotated[
        float,
        Configured(
            "of the outer step; auto: 0.7 with nesterov, 1 with sgd",
            Real(above=True, words=("auto",)),
            default="auto",
        ),
    ] = 1.0
    outer_momentum: Annotated[
        float,
        Configured(
            "of nesterov, per round; auto: 0.9",
            Real(below=True, maximum=1.0, words=("auto",)),
            default="auto",
        ),
    ] = 0.0
    gradients: Annotated[
        OuterGradients, Configured("what islands send: differences, or codes of 8 bits")
    ] = "fp32"
    """What travels: outer gradients themselves (in the dtype of masters, float32 at the least), or
    codes of 8 bits with a scale for each `outer_block` of them."""
    fragments: Annotated[int, Configured("parts of the model that meet in steps of their own")] = 1
    delay: Annotated[int, Configured("steps from a meeting to its outer step", FROM_ZERO)] = 0
    """Steps after a meeting at whose end its outer step is taken."""
    min_islands: Annotated[
        int | AllIslands,
        Configured(
            "with fewer islands the run ends; others are left out when they are lost",
            Integer(words=("all",)),
        ),
    ] = "all"
    """With how few islands a run goes on, where others are lost; "all" ends with the first."""
    restarts: Annotated[
        int,
        Configured(
            "times that each lost island is started again, where min_islands lets the run go on",
            FROM_ZERO,
        ),
    ] = DEFAULT_RESTARTS
    """How often each lost island is started again. Neither changes what a run computes that loses
    none."""
    outer_block: int = OUTER_BLOCK
    """Numbers of a row that share a scale; fewer in a proof, whose rows are short."""
    island: int = 0
    """In the plan of one island (`layout/islands.py`): which of them it is."""

    @property
    def active(self) -> bool:
        """Return whether islands train alone."""
        return self.every > 0

    @property
    def is_part(self) -> bool:
        """Return whether this is of the plan of one island alone."""
        return self.islands > 1 and not self.active

    @property
    def is_elastic(self) -> bool:
        """Return whether a run goes on without an island that is lost."""
        return self.active and self.min_islands != "all"

    @property
    def quantised(self) -> bool:
        """Return whether outer gradients travel in 8 bits."""
        return self.gradients != "fp32"

    @property
    def own_share(self) -> float:
        """Return the share of its own parameters that an island keeps in an outer step."""
        return LATE_MERGE if self.delay else 0.0

    def undisturbed(self) -> LocalSgd:
        """Return what a run does that loses none and need not be ready for it."""
        return replace(self, min_islands="all", restarts=DEFAULT_RESTARTS)

    def part(self, island: int) -> LocalSgd:
        """Return what the plan of one island says: which one it is, and no meetings."""
        return replace(LocalSgd(), islands=self.islands, island=island)

    def meets_after(self, step: int) -> tuple[int, ...]:
        """Return the fragments that meet at the end of `step` (from 0): spread over the round."""
        if not self.active:
            return ()
        count, place = self.fragments, (step + 1) % self.every
        return tuple(f for f in range(count) if (f + 1) * self.every // count % self.every == place)

    def changes_after(self, step: int) -> tuple[int, ...]:
        """Return the fragments whose outer step is taken at the end of `step`."""
        return self.meets_after(step - self.delay) if step >= self.delay else ()

    def ends_round(self, step: int) -> bool:
        """Return whether a round is over with `step`."""
        return self.active and (step + 1) % self.every == 0

    def fragment_of(self, layer: int | None, *, is_last: bool) -> int:
        """Return the fragment of a parameter: blocks take turns, ends go with the first and last.

        `layer` is None of what is no block's; `is_last` says of that whether it comes after them.
        """
        if layer is not None:
            return layer % self.fragments
        return self.fragments - 1 if is_last else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class IslandChange:
    """Say that an island was lost, or is in the run (again), at a meeting."""

    island: int
    """The island."""
    attempt: int
    """How often it had been started again by then."""
    step: int
    """Steps that were done when it last met the others, or that were done when it came in."""
    there: bool
    """Whether it is in the run from now on."""
    cause: str = ""
    """How it was lost."""
