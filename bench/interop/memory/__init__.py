"""Memory of weights that leave and come in: `python -m bench.interop.memory`.

folders.py   a run with weights that matter, made here, and the folders of other tools
paths.py     each way out, and each way in
measure.py   the most memory that a call takes, in a process of its own
"""
