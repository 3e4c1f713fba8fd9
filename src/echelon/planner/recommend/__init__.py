# SPDX-License-Identifier: Apache-2.0
"""Which plan of an answer to run: not the last percent, but what is simple and surely fits.

device_counts.py      plans on fewer devices than all
longest_sequence.py   the longest sequence of which a plan fits
recommend.py          the plan to run, and the fastest, leanest, cheapest and safest beside it
"""
