"""`ec.calibrate_machine`, `ec.calibrate_model`, `ec.calibrate_run`: what is measured, as a file.

`machine.py` measures kernels and collectives, `trainer.py` whole steps of small plans; together
they are a cluster file. `model.py` measures the units of a model, `run.py` refines the cluster of a
run by its events.
"""
