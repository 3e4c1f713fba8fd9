# SPDX-License-Identifier: Apache-2.0
"""All rules between settings, in the order of their telling, and what is asked of a Plan.

A run is checked by all of them (`config/load.py`), a Plan by those without which ranks could not
run it, and a suggestion is kept where they find nothing new.

What `ec.plan` makes has been checked with its settings. A plan may also be read from a file, or
changed in Python: it is seen as the settings that would give it, and the same rules are asked.
Whether this machine has room for its files is asked here too: a plan may be for another one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from echelon.config.job import ResolvedSetting
from echelon.config.plan_view import view_from_plan
from echelon.config.rules.blocks import (
    BLOCK_FINDERS,
    KERNEL_FINDERS,
    LORA_FINDERS,
    LORA_RUN_FINDERS,
    fused_pieces,
)
from echelon.config.rules.context import CONTEXT_EFFECT_FINDERS, CONTEXT_FINDERS
from echelon.config.rules.experts import (
    BALANCE_EFFECT_FINDERS,
    BALANCE_FINDERS,
    DISPATCH_FINDERS,
    EXPERT_MESH_FINDERS,
    expert_settings_of_dense_model,
)
from echelon.config.rules.islands import (
    LOCAL_SGD_FINDERS,
    LOCAL_SGD_PLAN_FINDERS,
    LOST_ISLAND_FINDERS,
    LOST_ISLAND_PLAN_FINDERS,
)
from echelon.config.rules.mesh import (
    COLLECTIVE_FINDERS,
    COLLECTIVE_PLAN_FINDERS,
    MESH_FINDERS,
    TENSOR_FINDERS,
    mesh_fits_cluster,
    mesh_settings_without_effect,
)
from echelon.config.rules.model import MODEL_FINDERS, PART_FINDERS, experts_enough, gate_is_built
from echelon.config.rules.pipeline import (
    PIPELINE_FINDERS,
    STAGE_FINDERS,
    pipeline_settings_without_effect,
)
from echelon.config.rules.precision import FP8_FINDERS, FP8_RUN_FINDERS, PRECISION_FINDERS
from echelon.config.rules.servers import SERVER_FINDERS, SERVER_PLAN_FINDERS
from echelon.config.rules.training import (
    MIXTURE_FINDERS,
    OPTIMIZER_FINDERS,
    RECOMPUTE_FINDERS,
    RUN_FINDERS,
    recomputed_operators,
)
from echelon.config.rules.violations import ViolationFinder, find_problems
from echelon.config.rules.zero import INT8_FINDERS, ZERO_FINDERS, int8_block_without_effect
from echelon.config.schema import SETTINGS
from echelon.config.view import View
from echelon.core.axis import Axis
from echelon.core.disk import offload_folder_problems
from echelon.core.errors import ConfigError, EnvironmentProblem, InfeasiblePlan, Problem
from echelon.core.plan import Plan
from echelon.core.rulebook.config import NOT_BUILT_YET
from echelon.core.rulebook.model import ASSUMED_MODEL_NEEDS_YES
from echelon.core.rulebook.zero import INT8_GATHER_OF_ALL, NVME_NEEDS_FOLDER
from echelon.core.settings.value_types import toml_text
from echelon.core.units import binary_bytes
from echelon.cost.bytes.held import bytes_held_by_pool
from echelon.layout.stage import pp_rank_of
from echelon.schedule.from_plan import pipeline_problems

EXPERT_FINDERS = (*PART_FINDERS, *EXPERT_MESH_FINDERS, *DISPATCH_FINDERS, *BALANCE_FINDERS)

FINDERS: tuple[ViolationFinder, ...] = (
    *MODEL_FINDERS,
    *BLOCK_FINDERS,
    *MESH_FINDERS,
    *SERVER_FINDERS,
    *PIPELINE_FINDERS,
    *STAGE_FINDERS,
    mesh_settings_without_effect,
    *ZERO_FINDERS,
    *CONTEXT_FINDERS,
    *CONTEXT_EFFECT_FINDERS,
    pipeline_settings_without_effect,
    *RECOMPUTE_FINDERS,
    *KERNEL_FINDERS,
    *COLLECTIVE_FINDERS,
    *LOCAL_SGD_FINDERS,
    *LOST_ISLAND_FINDERS,
    *OPTIMIZER_FINDERS,
    *PRECISION_FINDERS,
    *FP8_FINDERS,
    *FP8_RUN_FINDERS,
    *INT8_FINDERS,
    int8_block_without_effect,
    *LORA_FINDERS,
    *LORA_RUN_FINDERS,
    *RUN_FINDERS,
    *MIXTURE_FINDERS,
    *EXPERT_FINDERS,
    *BALANCE_EFFECT_FINDERS,
    mesh_fits_cluster,
)
"""Every rule between the settings of a run."""

PLAN_FINDERS: tuple[ViolationFinder, ...] = (
    gate_is_built,
    *BLOCK_FINDERS,
    experts_enough,
    recomputed_operators,
    fused_pieces,
    *COLLECTIVE_PLAN_FINDERS,
    *LOCAL_SGD_PLAN_FINDERS,
    *LOST_ISLAND_PLAN_FINDERS,
    *SERVER_PLAN_FINDERS,
    *TENSOR_FINDERS,
    *EXPERT_FINDERS,
    expert_settings_of_dense_model,
    *CONTEXT_FINDERS,
    *FP8_FINDERS,
    *INT8_FINDERS,
    *LORA_FINDERS,
)
"""Rules without which ranks could not run a plan; `schedule/from_plan.py` has its schedule."""


CHECKED = (
    *("model", "model.experts", "model.latent", "model.rotary", "model.multipliers"),
    *("mesh", "servers", "batch", "context", "experts"),
)
"""Tables whose values are looked at: those that decide what a rank computes and sends."""

FOLDER_KEY = "zero.offload_dir"
HOMES = ("optimizer_offload", "parameter_offload")


def require_trainable(plan: Plan, sources: Sequence[ResolvedSetting] = ()) -> None:
    """Raise ConfigError where a plan cannot be proven or trained, before any rank starts.

    Where there is nothing but faults of the layout, it is an InfeasiblePlan. `sources` tell where
    its settings came from, where that is known.
    """
    set_by = {setting.key: setting.source for setting in sources}
    found = [
        replace(problem, set_by=problem.set_by or set_by.get(problem.key, ""))
        for problem in (*plan_problems(plan), *pipeline_problems(plan))
    ]
    if found:
        missing = any(problem.rule == NOT_BUILT_YET.id for problem in found)
        raise (ConfigError if missing else InfeasiblePlan)(found)


def require_yes_to_assumed(plan: Plan, sources: Sequence[ResolvedSetting] = ()) -> None:
    """Raise ConfigError where something is assumed of a model, and its user has not said yes."""
    model = plan.model
    if not model.assumed or model.assume:
        return
    first, *others = model.assumed
    more = f", and {len(others)} more that `echelon plan` lists" if others else ""
    set_by = {setting.key: setting.source for setting in sources}
    raise ConfigError(
        ASSUMED_MODEL_NEEDS_YES.problem(
            f"of {model.name} is assumed: {first}{more}",
            key="model.assume",
            set_by=set_by.get("model.assumed", ""),
            suggestions=("model.assume = true",),
        )
    )


def plan_problems(plan: Plan) -> list[Problem]:
    """Return every problem of a plan but those of its schedule: values, then what they break."""
    view = view_from_plan(plan)
    problems = list(_value_problems(view)) or [
        *find_problems(view, FINDERS, PLAN_FINDERS),
        *_rounding_problems(plan),
    ]
    return [replace(problem, set_by="") for problem in problems]


def _value_problems(view: View) -> Iterator[Problem]:
    """Yield values that no setting takes."""
    for key, entry in view.entries.items():
        invalid = SETTINGS[key].kind.check(entry.value) if SETTINGS[key].table in CHECKED else None
        if invalid is not None:
            yield invalid.rule.problem(
                f"{key} = {toml_text(entry.value)} {invalid.message}",
                key=key,
                suggestions=invalid.suggestions,
            )


def _rounding_problems(plan: Plan) -> Iterator[Problem]:
    """Yield that matrices are to be rounded to int8 and are gathered otherwise, or the reverse.

    Settings cannot say either: the block of a run whose gather is another one is 0.
    """
    block, gather = plan.mathematics.precision.int8_block, plan.layout.zero.gather
    if (block > 0) != (gather == "int8"):
        rounds = f"rounded in blocks of {block}" if block else "not rounded (a block of 0)"
        yield INT8_GATHER_OF_ALL.problem(
            f'matrices are {rounds}, but zero.gather = "{gather}"',
            key="zero.gather",
            suggestions=('zero.gather = "int8" with stage 3',) if block else ("an int8_block",),
        )


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
            f"slices of {plan.name} rest in files, and the plan names no folder for them",
            key=FOLDER_KEY,
        )
        return [problem]
    needed = offloaded_bytes(plan, ranks)
    suggestions = (
        f"zero.offload_dir in a place with {binary_bytes(needed)} free",
        *(f'zero.{key} = "host"' for key in HOMES if getattr(zero, key) == "nvme"),
    )
    return [
        replace(problem, suggestions=suggestions)
        for problem in offload_folder_problems(Path(zero.offload_dir), needed)
    ]


def offloaded_bytes(plan: Plan, ranks: Iterable[int]) -> int:
    """Return the bytes that `ranks` keep in files; those at one place of a pipeline keep alike."""
    places = Counter(pp_rank_of(plan, rank) for rank in ranks)
    return sum(
        count * bytes_held_by_pool(plan, plan.mesh.rank({Axis.PP: place})).get("nvme", 0)
        for place, count in places.items()
    )
