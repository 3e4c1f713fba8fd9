"""Pipeline schedules as data: lists of actions per rank that are built, checked, timed and drawn.

A schedule says what each rank does and in which order; what it sends and receives follows from
that (`messages.py`). The executor runs the list, the simulator times it, and the checker proves
that it is complete and cannot deadlock. Adding a schedule is adding one builder to `build.py`.
"""
