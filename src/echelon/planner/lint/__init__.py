# SPDX-License-Identifier: Apache-2.0
"""Checks of any legal plan for what is seldom wanted.

finding.py     what a lint is, and what it finds
placement.py, memory.py, speed.py    the lints by what they look at
checks.py      all lints, what they find in a plan, and whether a plan fits
"""
