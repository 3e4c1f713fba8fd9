# SPDX-License-Identifier: Apache-2.0
"""From a request to the best plans of a model on a cluster.

plan_line.py        the words of a plan on a page, read as pins
pins.py             what a search is kept to: `--pin tp=8`, and what a trainer can run
run_settings.py     settings of a run that a search takes, assumes or refuses
request.py          what is asked: model, cluster, batch, trainer; the same on other devices
options.py          what a mesh leaves open: ZeRO, rounding, schedule, recompute
legal_meshes.py     every legal mesh with its microbatch, as columns of numbers, asked of `config/`
formulas.py         closed forms over the rows of a search, and their options as arrays
candidate.py        one plan as whole numbers; the best so far; how much a plan asks of its user
sweep.py            walks every plan of one world size, by bounds and closed forms
ranked.py           the best become Plans: timed by events, held to the byte
search.py           the whole search, the front of time, memory and devices; the smallest cluster
"""
