# SPDX-License-Identifier: Apache-2.0
"""The words that everything shares; standard library only, no torch, no NumPy, no other floor.

axis.py, mesh.py            the axes of a mesh, and ranks on it
plan.py                     Plan: what is computed, how it is split, on what
model_shape.py, parameters.py, experts.py   a model, its tensors, its experts
attention_mask.py           who meets whom, and where positions live
cluster.py                  devices, links, and what groups of ranks have of them
event.py                    what a rank did
errors.py, rules.py         problems, and the rules they name     rulebook/   every rule
messages/                   loggers, counts in sentences, words of other tools
choices/                    registries: optimizers, context kinds, plugins
serialize.py, units.py, svg.py   JSON, numbers for people, drawings
disk.py, offload_file.py    files that last, files of slices
optional.py, notebook.py, version.py   packages that only some commands need, views, our version
"""
