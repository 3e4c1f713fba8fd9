"""What is compiled for the explorer, from which entries: `web/src/compiled/formulas.js`.

``python -m echelon.page.explorer.program`` prints the module; a test compares it.
"""

from __future__ import annotations

from echelon.core.choices.collective_algorithms import COLLECTIVE_ALGORITHMS, algorithm_index
from echelon.cost.seconds import pipeline
from echelon.page.compiled.module import module_text
from echelon.page.compiled.names import CompiledProgram
from echelon.page.explorer.inputs import controls_of_record, predict
from echelon.page.explorer.mesh import mesh_axes
from echelon.page.explorer.rules import broken_rules, run_text


def explorer_program() -> CompiledProgram:
    """Return what the page computes."""
    return CompiledProgram(
        entries=(controls_of_record, predict, broken_rules, run_text, mesh_axes),
        evaluated=pipeline.TABLES_OF_SCHEDULES,
        read=frozenset(
            ("ranks", "step_s", "bytes_held", "tokens_per_s_per_device", "mfu"),
        ),
        tabulated={algorithm_index: list(COLLECTIVE_ALGORITHMS)},
    )


if __name__ == "__main__":
    print(module_text(explorer_program()), end="")
