# SPDX-License-Identifier: Apache-2.0
"""Files of a run.

times_file.py   measured times of a model's units
measurements.py measurements of a machine that are not all made yet
show.py         a job's settings as text: shown, and kept with a run
new_file.py     what `echelon config new` writes
"""
