"""The figures that explain: each a lesson with controls and steps, from the engine's own numbers.

lesson.py           what a lesson is
diagram.py          figures that only lessons have
catalog.py          all lessons, in the order of their topics
corrections.py      where published guides were wrong, for the lessons
matrices.py         small matrices of whole numbers, and their blocks as tiles
traces/             what ranks recorded, as JSON

mesh/ data/ collectives/ tensor/ zero/   the lessons, by topic
"""
