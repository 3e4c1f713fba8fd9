# SPDX-License-Identifier: Apache-2.0
"""Start ranks, watch them, end them together, and say which one failed first.

launchers.py        ranks by MPI, Slurm and Kubernetes, in the names of torchrun
environment.py      the one table of environment variables
gpu_variables.py    variables that ranks on GPUs get
host.py             cores and memory of this host
context.py          what a target knows of its rank, and how far it is
process_group.py    the store and the process group of a job
handshake.py        what ranks agree on before the first step
root_cause.py       which of several faults came first
local/              ranks that we start
launched_rank.py    a rank that a launcher started; watchdog.py watches it
launched_jobs.py    many short jobs on such ranks
"""
