# SPDX-License-Identifier: Apache-2.0
"""A run while it goes on, in a terminal: what it adds to its metrics, and curves in a line.

follow.py      what is new in the metrics of a run, and how it stands
sparkline.py   numbers as a row of marks
"""
