# SPDX-License-Identifier: Apache-2.0
"""Pipeline schedules as data: lists of actions per rank that are built, checked, timed and drawn.

A schedule says what each rank does and in which order; what it sends and receives follows from
that. The executor runs the list, the simulator times it, and the checker proves that it is complete
and cannot deadlock. Adding a schedule is adding one builder to `build.py`.

    action, messages, dependencies    a schedule; what crosses ranks, what needs what
    build, builder                    the registry, and what every builder offers
    gpipe, one_f_one_b, interleaved, breadth_first, zero_bubble, zero_bubble_v, dualpipe,
    dualpipe_v                        the builders, each with its paper
    from_plan, owners                 a plan's schedule; who owns which stage, from rows
    forward                           the forward passes alone, for an evaluation
    check, problems, deadlock         the proof, what is wrong with lists, circles of waits
    plan_problems                     what is wrong with the stages and rows of a plan
    simulate, flat_schedule, timer    seconds: event by event, of many plans, of many orders
    automatic, improve, list_scheduling, lower_bound: the search for a faster one
    staleness                         pipelines without a flush, as a table
    files, file_rows                  CSV and JSON
    draw, svg, time_axis              timelines in text and as a figure
"""
