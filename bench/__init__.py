"""Echelon compared with its peers: one model, one data stream, one machine, interleaved steps.

`python -m bench --list` shows all of them. A bench that is one file stands here; a subject of
several files is a room, whose `__main__` is its command.

    harness/    modes, cases, hosts and ranks that take turns, tables and verdicts
    context/    attention over long sequences          pipeline/   schedules and their simulation
    accuracy/   predictions compared with published runs, and the fits of constants
    faults/     kills at random moments                gpu/        everything for one CUDA GPU
    peers/      one file per peer                      data/       published runs
    results/    pages with dates
"""
