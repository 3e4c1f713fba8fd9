# SPDX-License-Identifier: Apache-2.0
"""Proof for code that is not ours: a user's file beside one device, whatever framework it runs in.

verify.py           verify: start ranks, capture, judge, and the verdict (verdict.py)
case.py             what a user's file gives and is given
subject_file.py     the file read and checked; errors of its code
named_mesh.py       a mesh whose axes have the user's names
reference.py        the training on one device
capture.py          what a rank captures from outside while it steps
observation.py      what the ranks captured, put together
sharding.py         what was asked to be sharded, beside what ranks hold
claims.py           what must hold, and how far off it may be
explain.py          the first wrong thing: factor, axis, cause; with gradients.py and updates.py

passing/            what passes between modules, where no claim has a cause
placement/          which part of which parameter a rank holds, one file for each framework
"""
