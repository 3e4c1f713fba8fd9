"""The verbs as functions: what `import echelon as ec` gives as `ec.plan`, `ec.prove`, `ec.train`.

Each raises the errors of `echelon.core.errors`, and returns a value instead of printing it. The
command line calls these; so may any program.
"""

from echelon.api.calibrate_machine import calibrate_machine
from echelon.api.calibrate_run import calibrate_run
from echelon.api.calibrating import calibrate
from echelon.api.comparing import compare
from echelon.api.exporting import ExportedRun, export
from echelon.api.importing import ImportedRun, import_run
from echelon.api.observing import observe_schedule
from echelon.api.parallelize import parallelize
from echelon.api.planning import plan
from echelon.api.proving import prove
from echelon.api.training import TrainResult, train

__all__ = [
    "ExportedRun",
    "ImportedRun",
    "TrainResult",
    "calibrate",
    "calibrate_machine",
    "calibrate_run",
    "compare",
    "export",
    "import_run",
    "observe_schedule",
    "parallelize",
    "plan",
    "prove",
    "train",
]
