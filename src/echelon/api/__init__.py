# SPDX-License-Identifier: Apache-2.0
"""The verbs of the command line as plain typed functions: what `import echelon as ec` gives.

    given_plan.py     a plan, or what has one     verifying.py      ec.verify, prove_module
    planning.py       ec.plan, compare, prove     observing.py      ec.observe, observe_schedule, ..
    training.py       ec.train                    converting.py     ec.export, import_run
    parallelizing.py  ec.parallelize              generating.py     ec.generate
    reporting.py      ec.report, explore
    collectives.py    ec.collectives.all_reduce, ..
    strategies.py     ec.strategy
    run_setup.py      what a run needs before its ranks
    calibrating/      ec.calibrate_machine, calibrate_model, calibrate_run, merge_calibrations

A module has the name of what it does, a function that of its verb: no name means both. Each
function raises the errors of `echelon.core.errors`, and returns a value instead of printing it. The
command line calls these; so may any program.
"""
