# SPDX-License-Identifier: Apache-2.0
"""Bisection: the smallest run that fails as a given one does, and what of it is needed.

run_settings.py   a plan as the settings of a run.toml, and what may be left out of them
bisect.py         halving: which settings, which degree, how many blocks and microbatches
program.py        the same for a program that is not ours: the numbers of its file
verdict.py        the smaller numbers that are tried; the smallest run.toml, and each part's need
"""
