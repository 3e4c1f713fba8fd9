# SPDX-License-Identifier: Apache-2.0
"""Ranks that we start on this host, and how they are watched.

supervisor.py       run jobs, from the first process to the last; a pool of ranks for many
rank_processes.py   the processes: start, hear, end them
fork_server.py      the process that imports torch once and forks ranks
rank.py             the life of a rank, and its thread that talks to the supervisor
stacks.py           where the threads of a rank are, and what they wait in
rank_status.py      what the supervisor knows of one rank
job_monitor.py      who is late, stopped, stuck or gone
meetings.py         ranks that wait for one another and will never meet
messages.py         what both sides say, over which channel; how a target is named
desync_watch.py     who is out of step, by the rings of the ranks
output.py           where the output of a rank goes
"""
