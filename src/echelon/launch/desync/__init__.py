# SPDX-License-Identifier: Apache-2.0
"""Say which rank is out of step, and with which call, by what all ranks have called.

fingerprint.py   what is known of a call, and of a rank at one time
ring.py          the last calls of a rank, in memory that outlives it
findings.py      what can be found: cut links, a verdict, and its words
verdict.py       who is odd: evidence in, a verdict out; on which link nothing arrives
connections.py   what the TCP connections of a process say

`local/desync_watch.py` compares the rings of local ranks, `launched/exchange.py` those of ranks
that another launcher started.
"""
