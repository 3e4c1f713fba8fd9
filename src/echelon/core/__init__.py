# SPDX-License-Identifier: Apache-2.0
"""The words that everything shares; standard library only, no torch, no NumPy, no other floor.

Files and rooms from the top floor down; each imports lower floors only:

plan.py                     Plan: what is computed, how it is split, on what
parameters.py               tensors of a model
model_shape.py              a model
serialize.py                JSON
disk.py, optional.py        files that last, files of slices, packages that only some commands need
choices/                    registries: optimizers, context kinds, plugins
mesh.py, experts.py         ranks on the axes of a mesh and on nodes, experts
settings/                   fields of records as settings of run.toml
rulebook/                   every rule
rules.py                    a rule, and what it says; words that a typo may mean
messages/                   loggers, counts in sentences, names, words of other tools
errors.py                   problems
attention_mask.py           who meets whom, and where positions live
axis.py, cluster.py, event.py   axes, devices and links, what a rank did
piece_sizes.py              sizes of the pieces in which a rank works through large tensors
units.py, svg.py, notebook.py, version.py   numbers for people, drawings, views
"""
