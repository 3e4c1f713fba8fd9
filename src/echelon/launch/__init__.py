# SPDX-License-Identifier: Apache-2.0
"""Start ranks, watch them, end them together, and say which one failed first.

launched/           ranks that another launcher started
local/              ranks that we start
handshake.py        what ranks agree on before the first step
process_group.py    the store and the process group of a job
context.py          what a target knows of its rank, and how far it is
room.py             room for the planned bytes, and a compiler for kernels
desync/             who is out of step, by what all ranks have called
environment.py      the one table of environment variables
launchers.py        ranks by MPI, Slurm and Kubernetes, in the names of torchrun; tf_config.py
gpus.py             the GPUs of this machine, and variables that ranks on them get
host.py             cores and memory of this host
root_cause.py       which of several faults came first
stop.py             a request to stop

These are floors: each imports only from those below it.
"""
