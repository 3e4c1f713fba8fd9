# SPDX-License-Identifier: Apache-2.0
"""Proofs of runs that have no order before they run: what they recorded is replayed on one device.

records.py              what each rank does, and what it writes down
asynchronous_replay.py  the recorded order of asynchronous servers in one process
asynchronous.py         what must hold of such a run, and the mistakes that explain it
lost_islands.py         the same of a run that loses an island
runs.py                 both runs: start the ranks, replay, judge
"""
