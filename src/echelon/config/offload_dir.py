"""Whether the folder of offloaded slices can hold those of the ranks of this machine.

A plan may be for another machine, so this is asked where a run starts, not where a plan is made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from echelon.core.axis import Axis
from echelon.core.errors import EnvironmentProblem, Problem
from echelon.core.offload_file import offload_folder_problems
from echelon.core.plan import Plan
from echelon.core.rulebook.zero import NVME_NEEDS_FOLDER
from echelon.core.units import binary_bytes
from echelon.cost.bytes_held import bytes_held_by_pool
from echelon.cost.stage import pp_rank_of

KEY = "zero.offload_dir"
HOMES = ("optimizer_offload", "parameter_offload")


def require_offload_dir(plan: Plan, ranks: Iterable[int], set_by: str = "") -> None:
    """Raise EnvironmentProblem where the slices of `ranks`, all on this machine, have no place."""
    if problems := offload_problems(plan, ranks):
        raise EnvironmentProblem(replace(problem, set_by=set_by) for problem in problems)


def offload_problems(plan: Plan, ranks: Iterable[int]) -> list[Problem]:
    """Return why files of the slices of `ranks` cannot lie in the folder that `plan` names."""
    zero = plan.layout.zero
    if all(getattr(zero, key) != "nvme" for key in HOMES):
        return []
    if not zero.offload_dir:
        problem = NVME_NEEDS_FOLDER.problem(
            f"slices of {plan.name} rest in files, and the plan names no folder for them", key=KEY
        )
        return [problem]
    needed = offloaded_bytes(plan, ranks)
    works = (
        f"zero.offload_dir in a place with {binary_bytes(needed)} free",
        *(f'zero.{key} = "host"' for key in HOMES if getattr(zero, key) == "nvme"),
    )
    return [
        replace(problem, works=works)
        for problem in offload_folder_problems(Path(zero.offload_dir), needed)
    ]


def offloaded_bytes(plan: Plan, ranks: Iterable[int]) -> int:
    """Return the bytes that `ranks` keep in files; those at one place of a pipeline keep alike."""
    places = Counter(pp_rank_of(plan, rank) for rank in ranks)
    return sum(
        count * bytes_held_by_pool(plan, plan.mesh.rank({Axis.PP: place})).get("nvme", 0)
        for place, count in places.items()
    )
