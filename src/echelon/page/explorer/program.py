"""What is compiled for the explorer, from which entries: `web/src/compiled/formulas.js`.

``python -m echelon.page.explorer.program`` prints the module; a test compares it.
"""

from __future__ import annotations

from echelon.core.choices.collective_algorithms import COLLECTIVE_ALGORITHMS, algorithm_index
from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.cost.seconds import pipeline
from echelon.cost.seconds.from_plan import num_states
from echelon.cost.seconds.pipeline import schedule_index
from echelon.page.compiled.module import module_text
from echelon.page.compiled.names import CompiledProgram
from echelon.page.explorer.controls import controls_of_record
from echelon.page.explorer.guides import guide_ways
from echelon.page.explorer.inputs import predict
from echelon.page.explorer.mesh import mesh_axes
from echelon.page.explorer.rules.finders import broken_rules
from echelon.page.explorer.run_file import run_text
from echelon.schedule.build import SCHEDULES


def explorer_program() -> CompiledProgram:
    """Return what the page computes."""
    return CompiledProgram(
        entries=(controls_of_record, predict, broken_rules, run_text, mesh_axes, guide_ways),
        evaluated=pipeline.TABLES_OF_SCHEDULES,
        read=frozenset(
            ("ranks", "workers", "step_s", "bytes_held", "tokens_per_s_per_device", "mfu"),
        ),
        tabulated={
            algorithm_index: list(COLLECTIVE_ALGORITHMS),
            num_states: list(OPTIMIZERS),
            schedule_index: list(SCHEDULES),
        },
    )


if __name__ == "__main__":
    print(module_text(explorer_program()), end="")
