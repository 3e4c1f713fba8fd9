# SPDX-License-Identifier: Apache-2.0
"""Figures that explain: each a lesson with controls and steps, from the engine's own numbers.

Files import only files of rooms above them in this list.

traces/             records of ranks, for lessons that show them
lesson.py           a lesson, its frames, and figures that only lessons have
corrections.py      mistakes of published guides, beside the lessons that correct them
matrices.py         small matrices of whole numbers, their blocks as tiles; an MLP cut over ranks
tensor/             matrices that are cut over tensor ranks
guides/             a tree of questions, derivations, errata, words
other files         one subject each: a lesson or more
catalog.py          all lessons, in the order of their topics
"""
