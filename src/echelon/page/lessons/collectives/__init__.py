"""Lessons about what ranks send one another.

four.py             all-reduce, all-gather, reduce-scatter and all-to-all, round by round
recorded.py         the messages that ranks recorded, and what each had after each round
"""
