# SPDX-License-Identifier: Apache-2.0
"""The pictures of a plan: memory bars, the waterfall of a step, and the mesh map.

In a terminal they are lines of 80 columns, in color where the terminal has it and `NO_COLOR` is not
set. As SVG and PNG the page draws them (`page/drawn/`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum

from echelon.core.plan import Plan
from echelon.planner.view.lines import TextLine
from echelon.planner.view.memory import MemoryBars, memory_bars, memory_rows_from_plan
from echelon.planner.view.mesh_map import MeshMap, mesh_map
from echelon.planner.view.text_layout import WIDTH
from echelon.planner.view.waterfall import Waterfall, waterfall

PLANNED = "fullest, planned"
"""The row of what the planner says that the fullest rank holds, above those of the ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFigures:
    """Hold the three pictures of a plan."""

    name: str
    memory: MemoryBars
    step: Waterfall
    mesh: MeshMap

    def text(self, *, columns: int = WIDTH) -> str:
        """Return all of them as lines for the terminal, in color where stdout shows it."""
        parts = [
            ("What ranks hold at their peak, at most", self.memory.lines(columns=columns)),
            ("Seconds of a step", self.step.lines(columns=columns)),
            ("Where ranks are", self.mesh.lines(columns=columns)),
        ]
        return "\n".join(f"{title}:\n\n{painted(lines)}" for title, lines in parts)


def draw(
    plan: Plan,
    seconds: Mapping[str, float],
    held: Mapping[str, float],
    *,
    columns: int = WIDTH,
) -> str:
    """Return what to print of a plan by the seconds of its step and the bytes of a rank."""
    return plan_figures(plan, seconds, held).text(columns=columns)


def plan_figures(
    plan: Plan, seconds: Mapping[str, float], held: Mapping[str, float]
) -> PlanFigures:
    """Return the pictures of a plan.

    The bar of `held` stands above those of the ranks, by exact formulas, which get as much slack
    and context as it has. Without `held` they have none.
    """
    planned = [(PLANNED, held)] if held else []
    ranks = [
        (label, {**terms, **_beside(terms, held)}) for label, terms in memory_rows_from_plan(plan)
    ]
    return PlanFigures(
        name=plan.name,
        memory=memory_bars([*planned, *ranks], plan.cluster.device.memory_bytes),
        step=waterfall(seconds),
        mesh=mesh_map(plan.mesh, plan.cluster, expert_tp=plan.layout.experts.expert_tp),
    )


def _beside(terms: Mapping[str, float], held: Mapping[str, float]) -> dict[str, float]:
    """Return what an allocator and a process hold back on a rank, as they do where `held` is."""
    found = {name: held[name] for name in ("slack", "context", "nccl") if name in held}
    used = fsum(held.values()) - fsum(found.values())
    if "slack" in found:
        found["slack"] *= fsum(terms.values()) / used if used > 0 else 0.0
    return found


def painted(lines: Sequence[TextLine]) -> str:
    """Return lines as text, with colors where stdout is a terminal that shows them."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True, emoji=False, markup=False)
    with console.capture() as capture:
        for line in lines:
            text = Text()
            for span in line:
                text.append(span.text, style=span.color or None)
            text.rstrip()
            console.print(text)
    return capture.get()
