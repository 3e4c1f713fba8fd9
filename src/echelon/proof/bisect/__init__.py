# SPDX-License-Identifier: Apache-2.0
"""Bisection: the smallest run that fails as a given one does, and what of it is needed.

bisect.py         settings of a run.toml that may be left out; halving them, degrees and blocks
program.py        the same for a program that is not ours: the numbers of its file
verdict.py        the smaller numbers that are tried; the smallest run.toml, and each part's need
"""
