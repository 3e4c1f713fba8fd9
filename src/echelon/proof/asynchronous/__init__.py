# SPDX-License-Identifier: Apache-2.0
"""The proof of asynchronous servers: a run, the order in which it applied gradients, a replay.

    record.py   what each rank does, and writes down
    replay.py   one process applies the same gradients in the same order
    claims.py   what must hold of the order, the bound, the bytes and the replay
    mistakes.py replays of known mistakes: that which gives the observed parameters is named

There is no order before the run, so no oracle can run ahead of it. Given the order, one process
computes each gradient from the versions that its worker had read, and updates as the servers did.
"""
