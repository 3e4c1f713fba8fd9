# SPDX-License-Identifier: Apache-2.0
"""Ranks that another launcher started: torchrun, srun, mpirun or Kubernetes.

rank.py       join a run as one of them
jobs.py       many short jobs on them
watchdog.py   the thread that watches a rank, where no supervisor of ours sees its process
exchange.py   who is out of step, by way of the launcher's store, or by what a rank knows alone
"""
