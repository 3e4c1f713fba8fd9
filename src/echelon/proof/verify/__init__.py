# SPDX-License-Identifier: Apache-2.0
"""Proof for code that is not ours: a user's file beside one device, whatever framework it runs in.

case.py             what a user's file gives and is given
subject_file.py     the file read and checked; errors of its code
placement/          which part of which parameter a rank holds, one file for each framework
watch.py            hooks that see what passes between modules, and labels
reference.py        the training on one device
capture.py          what a rank captures from outside while it steps
verify.py           verify: start ranks, capture, judge
"""
