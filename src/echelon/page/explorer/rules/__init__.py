# SPDX-License-Identifier: Apache-2.0
"""Which rules the controls of the explorer break, with their arithmetic: compiled for the page.

The rules themselves are finders over the settings of a run (`config/rules/`). These are what the
finders come to for settings that the page can make: a test asks both of random settings, and they
must name the same rules (tests/page/explorer/rules/test_finders.py). Context ranks and the lengths
of sequences are powers of two in the page (`tables.py`).

finders.py    all of them, in order
broken.py     a rule that is broken
mesh.py       mesh, batch, servers, devices       pipeline.py   schedule and stages
zero.py       ZeRO, its homes, and nodes          experts.py    experts and how rows travel
context.py    context kinds, recompute            rounding.py   fp8 and int8
"""
