# SPDX-License-Identifier: Apache-2.0
"""A document of plain values, its figures of a plan, and its text for a terminal.

Files import only files above them in this list.

    document.py     records: tables, figures, facts, sections, a whole page
    text_layout.py  sections, tables and sentences as text of so many columns
    terms.py        numbers that add up as they are shown; letters, hues and tones of terms
    plan_figures.py memory bars of ranks, and the waterfall of a step
    mesh_map.py     ranks on devices, and links of the groups of an axis
    figure_text.py  these figures as lines with colors for a terminal
"""
