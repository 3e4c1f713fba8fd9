"""The figures that explain: each a lesson with controls and steps, from the engine's own numbers.

lesson.py           what a lesson is
diagram.py          figures that only lessons have
catalog.py          all lessons, in the order of their topics
corrections.py      where published guides were wrong, for the lessons
"""
