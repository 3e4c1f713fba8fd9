# SPDX-License-Identifier: Apache-2.0
"""From a request to the best plans of a model on a cluster.

request.py          what is asked: model, cluster, batch, trainer; defaults that were taken
other_requests.py   a request with other devices or settings
defaults.py         the batch and the dtypes of a run that sets none
pins.py             what a search is kept to: `--pin tp=8`, and what a trainer can run
plan_line.py        the words of a plan on a page, read as pins
legal_meshes.py     every legal mesh with its microbatch, as columns of numbers, asked of `config/`
options.py          what a mesh leaves open: ZeRO, schedule, recompute
world_table.py      what searches of one run on so many ranks have in common
sweep.py            walks every plan of one world size, by bounds and closed forms
candidate.py        one plan as whole numbers; the best so far
ranked.py           the best become Plans: timed by events, held to the byte
search.py           the whole search, and the front of time, memory and devices
"""
