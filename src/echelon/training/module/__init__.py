# SPDX-License-Identifier: Apache-2.0
"""What a module that is split keeps: its optimizer, its state, its agreements.

optimizer.py   the optimizer, for a loop of one's own and torch's schedulers; what ranks agree on
state.py       reading, writing, saving and loading parameters and state
"""
