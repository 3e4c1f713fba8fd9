# SPDX-License-Identifier: Apache-2.0
"""What is compiled for the explorer, from which entries: `web/src/compiled/formulas.js`.

``python -m web.formulas.program`` prints the module; a test compares it.
"""

from __future__ import annotations

import json

from echelon.config.cluster.settings import cluster_of
from echelon.config.derived.context import automatic_degree
from echelon.config.derived.pipeline import stages_of_file, virtual_that_fit
from echelon.config.view import is_real
from echelon.core.choices.collective_algorithms import COLLECTIVE_ALGORITHMS, algorithm_index
from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.messages.plurals import COUNT, NUMBERED, OPERATORS, VERBS, in_singular
from echelon.core.settings.value_types import toml_text
from echelon.cost.inputs import pipeline
from echelon.cost.inputs.pipeline import schedule_index
from echelon.cost.seconds.from_plan import num_states
from echelon.page.explorer.broken_rules import broken_rules
from echelon.page.explorer.controls import controls_of_record, run_text
from echelon.planner.view.terms import tone_of
from echelon.schedule.build import SCHEDULES, unknown_schedule
from web.formulas.compiler.module import module_text
from web.formulas.compiler.names import CompiledProgram
from web.formulas.guides import guide_ways
from web.formulas.inputs import predict
from web.formulas.mesh import mesh_axes
from web.formulas.schedules import (
    lengths_of,
    schedule_default_stages,
    schedule_names,
    schedule_of_words,
    schedule_start,
    schedule_text,
    schedule_verdict,
)

SCHEDULE_ENTRIES = (
    schedule_names,
    schedule_default_stages,
    schedule_start,
    schedule_of_words,
    schedule_verdict,
    lengths_of,
    schedule_text,
)
"""What the page calls of schedules that are built there."""
SCHEDULE_MEMBERS = ("bubble_fraction", "bubble_overhead", "idle_s")
NOT_READ_OF_OPTIMIZERS = (
    *("title", "paper", "settings", "runner", "oracle", "gradient_behind", "tool_names"),
)
NOT_OF_THE_PAGE = frozenset(
    (
        *(("Rule", name) for name in ("why", "bad", "fixed")),
        *((name, "to_json") for name in ("Event", "Problem")),
        *(("RuleViolation", name) for name in ("set_by", "suggestions", "origin")),
        *(("Setting", name) for name in ("kind", "about", "path")),
        *(("Entry", name) for name in ("source", "folder", "gives_way", "path")),
        *(("Device", "efficiency"),),
        *(("ContextKindRecord", name) for name in ("facts", "runner", "tool_names")),
        *(("OptimizerRecord", name) for name in NOT_READ_OF_OPTIMIZERS),
        *(("Builder", name) for name in ("busy_s", "idle_s", "bubble_fraction", "bubble_overhead")),
    )
)
"""Members that share a name with what the page reads, and what rules explain at length.

Schedules are timed in the page: their closed forms are of no use there.
"""


def _singular() -> str:
    """The page's own `in_singular`, given the words of Python's: patterns are not compiled."""
    pattern = COUNT.pattern.replace("(?P<", "(?<")
    words = (pattern, VERBS, (*NUMBERED, *OPERATORS))
    return f"$rt.singular.bind(null, {', '.join(map(json.dumps, words))})"


def explorer_program() -> CompiledProgram:
    """Return what the page computes."""
    return CompiledProgram(
        entries=(
            *(controls_of_record, predict, broken_rules, run_text, mesh_axes, guide_ways),
            *SCHEDULE_ENTRIES,
            tone_of,
        ),
        evaluated=pipeline.TABLES_OF_SCHEDULES,
        read=frozenset(
            (
                *("ranks", "workers", "step_s", "bytes_held", "tokens_per_s_per_device", "mfu"),
                *SCHEDULE_MEMBERS,
            ),
        ),
        dropped=NOT_OF_THE_PAGE,
        given={
            in_singular: _singular(),
            toml_text: "$rt.toml",
            ValueError: "new Error",
            cluster_of: "((view) => view.cluster)",
            # Every number is a float there, no schedule is a file, no degree is left open.
            is_real: "(() => false)",
            stages_of_file: "$rt.unknown",
            virtual_that_fit: "$rt.unknown",
            automatic_degree: "$rt.unknown",
            unknown_schedule: "$rt.unknown",
        },
        tabulated={
            algorithm_index: list(COLLECTIVE_ALGORITHMS),
            num_states: list(OPTIMIZERS),
            schedule_index: list(SCHEDULES),
        },
    )


if __name__ == "__main__":
    print(module_text(explorer_program()), end="")
