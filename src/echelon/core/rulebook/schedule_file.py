# SPDX-License-Identifier: Apache-2.0
"""Rules about a schedule that somebody wrote: the file, and what its ranks may hold."""

from echelon.core.rules import Rule

SCHEDULE_FILE_READABLE = Rule(
    id="schedule-file-readable",
    why="""
    A schedule is a CSV or JSON file in UTF-8. In CSV a row is a rank and a cell is a slot: it holds
    an action such as F0.3, several with blanks between them, or nothing; a first cell may say
    which rank it is, and what stands behind # is a comment. In JSON it is what Echelon writes, or a
    list of rows; a row is a list of cells, or one text.
    """,
    bad='{"rank 0": "F0.0 BW0.0"}',
    fixed='["F0.0 BW0.0"]',
)

SCHEDULE_ACTION_KNOWN = Rule(
    id="schedule-action-known",
    why="""
    An action is a kind, a stage and a microbatch: F0.3 is the forward pass of microbatch 3 on stage
    0. The kinds are F, B (the gradient of the stage's input), W (the gradients of its weights) and
    BW (both at once). Anything else would be skipped or guessed at, and the run would not be the
    one that you drew.
    """,
    bad="rank 0,F0.0,D0.0",
    fixed="rank 0,F0.0,BW0.0",
)

SCHEDULE_ROWS_ARE_RANKS = Rule(
    id="schedule-rows-are-ranks",
    why="""
    A schedule has one row per pipeline rank. Where rows say which rank they are, all of them do,
    and each rank from 0 up has one; rows without a name are the ranks in the order of the file.
    """,
    example="""
    rank 0,F0.0,,,BW0.0
    %s
    """,
    bad="rank 0,,F1.0,BW1.0,",
    fixed="rank 1,,F1.0,BW1.0,",
)

SCHEDULE_WITHIN_MEMORY = Rule(
    id="schedule-within-memory",
    why="""
    A forward pass keeps its activations until BW, or W where the backward pass is split, has used
    them. The most (stage, microbatch) pairs that a rank holds at once is its peak, and most of the
    memory that a schedule can change. Over the limit that you set, the run would end out of memory
    in the middle of its first step. The message names the action with which the limit is passed.
    """,
    bad="rank 0,F0.0,F0.1,BW0.0,BW0.1                     # holds 2, with --most-in-flight 1",
    fixed="rank 0,F0.0,BW0.0,F0.1,BW0.1",
)
