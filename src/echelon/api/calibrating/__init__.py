# SPDX-License-Identifier: Apache-2.0
"""`ec.calibrate_machine`, `ec.calibrate_model`, `ec.calibrate_run`: what is measured, as a file.

machine.py     a cluster file of this machine, or of all nodes under torchrun
place.py       how many ranks of what device are measured
measuring.py   kernels and collectives, then whole steps of small plans: each once
merge.py       `ec.merge_calibrations`: several such files -> one
run.py         the units of a model; the cluster of a run, refined by its events
"""
