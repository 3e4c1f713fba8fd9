# SPDX-License-Identifier: Apache-2.0
"""The words that everything shares; standard library only, no torch, no NumPy, no other floor.

Files and rooms from the top floor down; each imports lower floors only:

offload_file.py             files of slices
disk.py, optional.py        files that last, packages that only some commands need
plan.py                     Plan: what is computed, how it is split, on what
parameters.py               tensors of a model
model_shape.py              a model
serialize.py                JSON
rulebook/                   every rule
choices/                    registries: optimizers, context kinds, plugins
mesh.py                     ranks on the axes of a mesh
rules.py                    a rule, and what it says; words that a typo may mean
messages/                   loggers, counts in sentences, words of other tools
errors.py                   problems
attention_mask.py           who meets whom, and where positions live
axis.py, cluster.py, experts.py, event.py   axes, devices and links, experts, what a rank did
quantities.py, units.py, svg.py, notebook.py, version.py   numbers for people, drawings, views
"""
