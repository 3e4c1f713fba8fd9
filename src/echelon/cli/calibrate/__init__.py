# SPDX-License-Identifier: Apache-2.0
"""`echelon calibrate`: measure this machine, a model's units on it, or what a run says of it.

command.py    the flags, and what they start; `calibrate merge` joins measured files
text.py       what is printed: the constants that were found, and how far each time is off
"""
