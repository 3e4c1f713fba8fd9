# SPDX-License-Identifier: Apache-2.0
"""Files of a run.

measurements.py measured times of a model's units, measurements of a machine not all made yet
show.py         a job's settings as text: shown, and kept with a run
new_file.py     what `echelon config new` writes
"""
