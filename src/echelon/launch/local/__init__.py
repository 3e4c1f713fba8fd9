# SPDX-License-Identifier: Apache-2.0
"""Ranks that we start on this host, and how they are watched.

supervisor.py       run jobs, from the first process to the last; a pool of ranks for many
rank_processes.py   the processes: start, hear, end them
fork_server.py      the process that imports torch once and forks ranks
rank.py             the life of a rank, and its thread that talks to the supervisor
stacks.py           where the threads of a rank are, and what they wait in
rank_status.py      what the supervisor knows of one rank
job_monitor.py      who is late, stopped, stuck or gone
messages.py         what both sides say, over which channel; how a target is named
desync_watch.py     who will never meet: by the rings of ranks, and by what stands still
output.py           where the output of a rank goes
"""
