# SPDX-License-Identifier: Apache-2.0
"""`echelon compare`: what differs between two plans, or between strategies and one process.

command.py     the flags; two plans side by side, as text and as JSON
strategies.py  each way to split a run beside one process: the table of deviations
"""
