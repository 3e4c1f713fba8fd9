# SPDX-License-Identifier: Apache-2.0
"""The planner: the best plans of a model on a cluster, and what is to be said of any plan.

Rooms, each of which imports from rooms above it in this list alone:

predict/    what a plan takes: seconds of a step and bytes of its fullest rank, with bands
search/     a request becomes an answer: every legal plan is walked, the best become Plans
lint/       what is legal, and seldom wanted
explain/    why an answer is what it is, what would change it, what would make a plan fit
recommend/  which plan of an answer to run: simple, sure to fit
view/       a document of plain values, figures of a plan, their text
report/     the report of one run, as a document, as text and as JSON
answer/     what was found, as a value: its page, its JSON, its table of plans
"""
