# SPDX-License-Identifier: Apache-2.0
"""Local SGD: what islands send each other, and what they make of it.

`quantised.py`       what is sent in 8 bits
`checkpoint.py`      what a checkpoint holds of islands, and how those that write it talk
`outer_steps.py`     the step part: when fragments meet, and when their outer step is taken
`meetings.py`        who meets where islands may be lost, and whether it counts
`elastic_steps.py`   the step part of islands that may be lost, and what they missed
"""
