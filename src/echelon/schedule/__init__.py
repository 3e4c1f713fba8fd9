# SPDX-License-Identifier: Apache-2.0
"""Pipeline schedules as data: lists of actions per rank that are built, checked, timed and drawn.

A schedule says what each rank does and in which order; what it sends and receives follows from
that. The executor runs the list, the simulator times it, and the checker proves that it is complete
and cannot deadlock. Adding a schedule is adding one builder to `build.py`.

    action, messages            a schedule; what needs what, and what crosses ranks
    builders, build             the builders, each with its paper; the registry
    rows, files                 schedules as rows of words; CSV and JSON
    from_plan                   a plan's schedule, its forward passes alone for an evaluation, and
                                what is wrong with its stages and rows
    check, deadlock             the proof, circles of waits
    simulate, timer             seconds: event by event, and of many orders or plans
    automatic, list_scheduling, lower_bound    the search for a faster one
    staleness                   pipelines without a flush, as a table
    draw                        timelines in text and as a figure
"""
