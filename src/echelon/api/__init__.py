# SPDX-License-Identifier: Apache-2.0
"""The verbs of the command line as plain typed functions: what `import echelon as ec` gives.

    given_plan.py     a plan, or what has one     comparing.py      ec.compare, compare_strategies
    planning.py       ec.plan, prove, bisect      verifying.py      ec.verify, rehearse, ..
    training.py       ec.train                    observing.py      ec.observe, observe_schedule, ..
    parallelizing.py  ec.parallelize, threaded    converting.py     ec.export, import_run
    reporting.py      ec.report, explore          exporting.py      ec.export_weights
    collectives.py    ec.collectives.all_reduce   generating.py     ec.generate
    strategies.py     ec.strategy                 module_subject.py a user's module to be proved
    run_setup.py      what a run needs before its ranks
    calibrating/      ec.calibrate_machine, calibrate_model, calibrate_run, merge_calibrations

A module has the name of what it does, a function that of its verb: no name means both. Each
function raises the errors of `echelon.core.errors`, and returns a value instead of printing it. The
command line calls these; so may any program.
"""
