# SPDX-License-Identifier: Apache-2.0
"""See a plan: what ranks hold, where the seconds of a step go, where ranks sit.

Each picture is made of plain values, and is lines of text for a terminal; the page draws them too.

    memory.py       bytes of each rank by kind, as bars; rows of a plan
    waterfall.py    seconds of a step by term, as bars
    mesh_map.py     ranks on devices, and which links the groups of an axis use
    terms.py        numbers that add up as they are shown; letters, hues and tones of terms
    text_layout.py  tables and sentences in 80 columns
    lines.py        text with colors for a terminal
"""
