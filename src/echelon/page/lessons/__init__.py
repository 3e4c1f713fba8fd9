# SPDX-License-Identifier: Apache-2.0
"""The figures that explain: each a lesson with controls and steps, from the engine's own numbers.

lesson.py           what a lesson is
diagram.py          figures that only lessons have
catalog.py          all lessons, in the order of their topics
corrections.py      where published guides were wrong, for the lessons
matrices.py         small matrices of whole numbers, and their blocks as tiles
traces/             what ranks recorded for the lessons

The lessons, by topic:

mesh/               the axes of a model's split, one by one and together
data/               batches over ranks
collectives/        what ranks send one another
tensor/             matrices cut over ranks
pipeline/           stages, and schedules slot by slot
zero/               shares of model state
context/            rings, and slices of keys
experts/            tokens on their way
guides/             trees of questions, derivations, errata, words
"""
