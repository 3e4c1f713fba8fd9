# SPDX-License-Identifier: Apache-2.0
"""Islands of local SGD that may be lost: who meets, what counts, and how one comes back.

    meetings.py who is at a meeting, and whether it counts: decided once, for all ranks
    exchange.py what objects the ranks of several islands tell each other, through the store

Islands that end together meet in a process group of all ranks (`parallel/device_mesh.py`).
"""
