# SPDX-License-Identifier: Apache-2.0
"""Mirrors of a run in trackers, made from metrics.jsonl alone, in processes of their own.

Training calls nothing here: metrics.jsonl is what happened, and a mirror that hangs or fails is
behind, not wrong. `echelon observe RUN --mirror TOOL` goes on where it stopped.

    tracker.py              what a tracker can do, and what it is told: points of metrics.jsonl
    progress.py             how far a mirror got, and whether another process writes it
    worker.py               the process of one mirror: read, undo steps taken again, write, note
    guard.py                the process that starts and ends them, beside a run
    start.py                what a run does of it: check, start, tell
    tensorboard.py          event files
    weights_and_biases.py   offline folders, or the server of the user's choice
    mlflow.py               a folder, or the server of the user's choice
    trackio.py              a database
"""
