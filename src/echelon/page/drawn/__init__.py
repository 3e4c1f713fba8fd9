# SPDX-License-Identifier: Apache-2.0
"""Figures of the page without a browser: the same records, drawn as SVG, for papers and notebooks.

What is drawn is what the page draws first: nothing is chosen yet. Nothing in a drawing has a color
of its own but boxes and lines, so that it reads on light and on dark paper.

marks.py       the parts of drawings: boxes, words, keys; a drawing as a file or inside of HTML
axis.py        round numbers on an axis, and where values lie
bars.py, waterfall.py, heat.py, lines.py, mesh.py, schedule.py    each kind of figure
figure.py      the drawing of a part of a page, whatever its kind
files.py       every figure of a page into files, SVG or PNG
static.py      a whole page as HTML without a script
"""
