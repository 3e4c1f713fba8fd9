# SPDX-License-Identifier: Apache-2.0
"""What a plan takes: seconds of a step and bytes of its fullest rank, by term.

estimate.py         one plan, with the band that the trainer leaves open; bytes of each place
bands.py            seconds and bytes with what is not known of them, and what that rests on
nearest_run.py      the published run that is nearest to a plan
expected.py         the expected seconds of a step in a long run
stage_rows.py       what ranks at each place of a pipeline hold and send, by the exact lists
split_memory.py     bytes of a split that is no plan: for guides and lints
residuals.py        how far predictions were from runs (generated)
"""
