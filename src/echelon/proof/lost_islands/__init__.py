# SPDX-License-Identifier: Apache-2.0
"""The proof of islands that may be lost: a run that loses one, who met when, a replay.

    record.py   what each rank does, and writes down at each meeting
    replay.py   one process trains the islands that met, one after another
    claims.py   what must hold of who met, the replay, the bytes; known mistakes, replayed

When an island is lost is not known before the run, so no oracle can run ahead of it. Given who met,
one process takes the same steps. All that does not depend on losses is proven as of islands that
lose none (`proof/claims/islands.py`).
"""
