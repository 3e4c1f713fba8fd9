# SPDX-License-Identifier: Apache-2.0
"""`ec.calibrate_machine`, `ec.calibrate_model`, `ec.calibrate_run`: what is measured, as a file.

machine.py     a cluster file of this machine, or of all nodes under torchrun
place.py       how many ranks of what device are measured
measuring.py   kernels and collectives, each once, whatever interrupts
trainer.py     whole steps of small plans
merge.py       `ec.merge_calibrations`: several such files -> one
model.py       the units of a model
run.py         the cluster of a run, refined by its events
"""
