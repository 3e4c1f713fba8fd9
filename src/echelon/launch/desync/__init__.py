# SPDX-License-Identifier: Apache-2.0
"""Say which rank is out of step, and with which call, by what all ranks have called.

fingerprint.py   what is known of a call, and of a rank at one time
ring.py          the last calls of a rank, in memory that outlives it
findings.py      what can be found, and a verdict
verdict.py       who is odd: evidence in, a verdict out
cut.py           on which link nothing arrives
kin.py           who may judge whom
connections.py   what the TCP connections of a process say
links.py         which links are cut, by what connections say at both ends
wording.py       the verdict in words
watch.py         the comparison by a supervisor, who reads the rings of local ranks
exchange.py      the comparison under torchrun, by way of the launcher's store
alone.py         what a rank says that reaches no store
"""
