# SPDX-License-Identifier: Apache-2.0
"""Lessons about pipelines.

stages.py           a model cut into consecutive stages
walk.py             the naive schedule, GPipe and 1F1B, slot by slot
schedules.py        GPipe beside 1F1B: efficiency, and the bubble by both definitions
gantt.py            the chart of a simulated schedule, in slots, as far as it is told
"""
