# SPDX-License-Identifier: Apache-2.0
"""The report of one run: sections, of which its text, its page and its notebook are made.

Files import only files above them in this list.

    head.py       facts: model, mesh, choices of the layout, experts, servers, islands
    memory.py     bytes between steps, bytes that a step adds, choices of ZeRO, servers
    sent.py       groups of ranks, messages of a step, bytes by axis
    pipeline.py   stages and schedule in time
    estimate.py   a step, memory and rates with their bands: also of a search
    printed_numbers.py  the arithmetic among numbers of the JSON; its numbers on a page
    sections.py   sections of a page: figures beside the tables of the files above
    report.py     the report as text and as JSON; its pictures in a terminal
"""
