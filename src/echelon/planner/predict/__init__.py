# SPDX-License-Identifier: Apache-2.0
"""What a plan takes: seconds of a step and bytes of its fullest rank, by term.

estimate.py         one plan, with the band that the trainer leaves open
peak_bytes.py       bytes of each place of a pipeline, from the lists of a Plan
formulas.py         the same closed forms over the rows of a search, and their options as arrays
stage_rows.py       what ranks at each place of a pipeline hold and send, by the exact lists
split_memory.py     bytes of a split that is no plan: for guides and lints
residuals.py        how far predictions were from runs (generated)
"""
