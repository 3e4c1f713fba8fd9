# SPDX-License-Identifier: Apache-2.0
"""Lessons about several splits at once: ranks as a grid.

three_dimensions.py the batch, each matrix, or the layers: what a rank has of them
baby_steps.py       a model and its data cut three times, one cut after the other
degrees.py          degrees to choose, and the grid that they make
links.py            which axis travels over which links, by the order of ranks
"""
