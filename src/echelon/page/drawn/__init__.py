# SPDX-License-Identifier: Apache-2.0
"""Figures of the page without a browser: the same records, drawn as SVG, for papers and notebooks.

What is drawn is what the page draws first: nothing is chosen yet. Nothing in a drawing has a color
of its own but boxes and lines, so that it reads on light and on dark paper.

marks.py       the parts of drawings: boxes, words, keys; a drawing as a file or inside of HTML
bars.py        bars of parts, the waterfall of a step, a grid of cells
lines.py       lines and pipelines over an axis of round numbers
mesh.py        ranks on nodes, and the groups of an axis
document.py    a document as HTML without a script, and its figures as files, SVG or PNG
"""
