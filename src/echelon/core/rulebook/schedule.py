# SPDX-License-Identifier: Apache-2.0
"""Rules about pipeline schedules: which exist, what they need, and what a legal one looks like."""

from echelon.core.rules import Rule

SCHEDULE_KNOWN = Rule(
    id="schedule-known",
    why="""
    A pipeline schedule is chosen by name: naive, gpipe, 1f1b, interleaved-1f1b, breadth-first,
    zb-h1, zb-h2, zb-v, dualpipe or dualpipe-v. A name that no builder answers to cannot be run,
    and a silent fallback would train with another bubble and another peak of activation memory
    than the one you planned.
    """,
    example="""
    [pipeline]
    %s
    """,
    bad='schedule = "1F1B"',
    fixed='schedule = "1f1b"',
)

SCHEDULE_NEEDS_MICROBATCHES = Rule(
    id="schedule-needs-microbatches",
    why="""
    A pipeline is filled by microbatches. 1F1B needs at least as many as it has stages: with
    m < p the first stages finish all forward passes before their first backward pass, so there
    is no steady phase, the peak of activation memory is that of GPipe, and at least half of the
    step is bubble: (p-1)/(m+p-1) >= 1/2. The same p, the number of ranks, is the least for
    interleaved-1f1b, breadth-first, zb-h1, zb-h2 and zb-v. dualpipe and dualpipe-v need 2 p, so
    that both streams fill the pipeline before they meet. naive and gpipe take any number. The
    number of microbatches is global_sequences / (microbatch_sequences x data-parallel degree).
    """,
    example="""
    [mesh]
    pp = 4
    [pipeline]
    schedule = "1f1b"
    %s
    """,
    bad="""
    [batch]                     # 2 microbatches for 4 stages
    global_sequences = 16
    microbatch_sequences = 8
    """,
    fixed="""
    [batch]                     # 8 microbatches for 4 stages
    global_sequences = 16
    microbatch_sequences = 2
    """,
)

SCHEDULE_EVEN_MICROBATCHES = Rule(
    id="schedule-even-microbatches",
    why="""
    dualpipe lets half of a step's microbatches enter the pipeline at the first rank and half at
    the last, and its ranks run the two halves in turn. With an odd number one end would have one
    more than the other, for which the order of its steps has no place.
    """,
    example="""
    [mesh]
    pp = 2
    [pipeline]
    schedule = "dualpipe"
    %s
    microbatch_sequences = 2
    """,
    bad="""
    [batch]                     # 5 microbatches
    global_sequences = 10
    """,
    fixed="""
    [batch]                     # 6 microbatches
    global_sequences = 12
    """,
)

SCHEDULE_EVEN_RANKS = Rule(
    id="schedule-even-ranks",
    why="""
    dualpipe keeps two copies of the model on the pipeline, one the mirror image of the other:
    rank r holds stage r and a copy of stage p-1-r. The middle rank of an odd number would be its
    own mirror image, and hold the same stage twice.
    """,
    example="""
    [mesh]
    %s
    [pipeline]
    schedule = "dualpipe"
    """,
    bad="pp = 3",
    fixed="pp = 4",
)

SCHEDULE_STAGES_PER_RANK = Rule(
    id="schedule-stages-per-rank",
    why="""
    A schedule is written for one placement of stages. naive, gpipe, 1f1b, zb-h1, zb-h2 and
    dualpipe place one stage on each pipeline rank (dualpipe also the copy of another one).
    interleaved-1f1b and breadth-first place two or more, stage s on rank s % p; with one they
    would be 1f1b and gpipe. zb-v and dualpipe-v place two in the shape of a V, r and 2p-1-r on
    rank r. With other numbers a rank would hold stages that the schedule never visits, or none.
    """,
    example="""
    [mesh]
    pp = 2
    [pipeline]
    schedule = "1f1b"
    %s
    """,
    bad="virtual_stages = 2          # 4 stages for 2 ranks",
    fixed="virtual_stages = 1",
)

SCHEDULE_PLACES_STAGES = Rule(
    id="schedule-places-stages",
    why="""
    A schedule has one list of actions per rank, and names for each stage the rank that holds
    it. A stage on a rank that does not exist is never computed; a rank without a stage waits
    for nothing.
    """,
    bad='{"num_ranks": 2, "stage_ranks": [0, 2], ...}     # ranks are 0 and 1',
    fixed='{"num_ranks": 2, "stage_ranks": [0, 1], ...}',
)

SCHEDULE_COVERS_ONCE = Rule(
    id="schedule-covers-once",
    why="""
    Every microbatch crosses every stage forward once and backward once, on the rank that holds
    the stage: F, and then either BW or the pair B and W. A missing cell drops gradients without
    an error; a doubled one counts a microbatch twice.
    """,
    bad="rank 0:  F0.0 F0.0 BW0.0                         # F0.0 twice, microbatch 1 never",
    fixed="rank 0:  F0.0 F0.1 BW0.0 BW0.1",
)

SCHEDULE_KEEPS_ORDER = Rule(
    id="schedule-keeps-order",
    why="""
    An action can only use what an earlier one made: a stage needs the output of the stage before
    it, a backward pass the activations of its own forward pass and the gradient of the stage after
    it, a weight gradient W its input gradient B. A rank runs its list from left to right, so where
    one rank owns both, the maker stands left of the user.
    """,
    bad="rank 0:  F0.0 BW0.1 F0.1 BW0.0                   # BW0.1 stands before F0.1",
    fixed="rank 0:  F0.0 F0.1 BW0.0 BW0.1",
)

SCHEDULE_CANNOT_DEADLOCK = Rule(
    id="schedule-cannot-deadlock",
    why="""
    Ranks wait for one another's activations and gradients. Where the waits form a circle, every
    rank in it waits for ever and the run hangs. The message names the circle: each rank, the
    action that it cannot start, and the action elsewhere that it waits for.
    """,
    bad="""
    rank 0:  F0.0 BW0.0 F0.1 BW0.1                   # waits for BW1.0
    rank 1:  F1.0 F1.1 BW1.0 BW1.1                   # waits for F0.1, behind BW0.0
    """,
    fixed="""
    rank 0:  F0.0 F0.1 BW0.0 BW0.1
    rank 1:  F1.0 F1.1 BW1.0 BW1.1
    """,
)
