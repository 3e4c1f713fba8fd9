# SPDX-License-Identifier: Apache-2.0
"""Checks of any legal plan for what is seldom wanted.

checks.py       all lints, and what they find in a plan; finding.py: what a lint is
placement.py, pipeline.py, memory.py, compute.py, traffic.py    the lints by what they look at
"""
