# SPDX-License-Identifier: Apache-2.0
"""Rules about pipelines: stages, schedules, files of schedules, the search for a schedule."""

from echelon.core.rules import Area, Rule

LAYERS_FILL_STAGES = Rule(
    id="layers-fill-stages",
    why="""
    A model has as many blocks as there are stages, or more: mesh.pp x pipeline.virtual_stages (with
    dualpipe: mesh.pp). With fewer, some stages would have nothing to compute and the others nothing
    to gain. Whoever wants that, for an embedding or a head that is worth a stage of its own, lists
    the blocks of each stage; a stage may then have none.
    """,
    example="""
    [model]
    layers = 4
    [mesh]
    %s
    """,
    bad="pp = 8",
    fixed="pp = 4",
)

STAGES_COVER_LAYERS = Rule(
    id="stages-cover-layers",
    why="""
    Explicit stages name each block once, in order: a block that no stage owns would be dropped, one
    that two own would run twice. A stage may have no block.
    """,
    example="""
    [mesh]
    pp = 2
    [pipeline]
    %s
    """,
    bad="stages = [[0, 1], [3, 2]]",
    fixed="stages = [[0, 1], [2, 3]]",
)

STAGES_MATCH_MESH = Rule(
    id="stages-match-mesh",
    why="""
    There is one list of blocks for each pipeline stage: pp x virtual_stages of them (with dualpipe:
    pp, each on two ranks).
    """,
    example="""
    [mesh]
    pp = 2
    [pipeline]
    %s
    """,
    bad="stages = [[0], [1], [2, 3]]",
    fixed="stages = [[0, 1], [2, 3]]",
)

SCHEDULE_FILE_FITS_RUN = Rule(
    id="schedule-file-fits-run",
    why="""
    A schedule in a file has a row for each pipeline rank, and names its stages and microbatches. So
    the run must have as many of each: mesh.pp ranks, mesh.pp x pipeline.virtual_stages stages, and
    global_sequences / (microbatch_sequences x data-parallel degree) microbatches. On which ranks
    the stages are, the file alone says: one rank may have three, and another one.
    """,
    example="""
    # mine.csv has 2 rows and 8 microbatches
    [mesh]
    %s
    [pipeline]
    schedule = "file"
    file = "mine.csv"
    """,
    bad="pp = 4",
    fixed="pp = 2",
)

ROWS_FIT_PLAN = Rule(
    id="rows-fit-plan",
    why="""
    A plan whose schedule is "file" or "auto" holds what each pipeline rank runs: a row for each of
    its mesh.pp ranks, in which all of its stages and microbatches stand, and no others. Every other
    schedule has a builder, and its plan has no rows: with both it would not be known which of them
    to run. A plan that `echelon plan` or `ec.plan` made is so; one that was edited may not be.
    """,
    bad='pipeline = replace(plan.layout.pipeline, rows=("F0.0 BW0.0",))      # schedule is "1f1b"',
    fixed='pipeline = replace(plan.layout.pipeline, schedule="file", rows=("F0.0 BW0.0",))',
)

TIED_ENDS_MIRRORED = Rule(
    id="tied-ends-mirrored",
    why="""
    A schedule may let some microbatches cross the ranks the other way round; each stage is then on
    two ranks, r and p-1-r. A tied embedding is part of the first stage and of the last, and its
    gradient is summed over the two ranks that hold copies of the same stages. So both stages must
    be on the same two ranks, as in DualPipe: if the first is on rank r, then the last is on p-1-r
    or on r. Elsewhere the embedding would be on three or four ranks, and each pair of them would
    train one of its own.
    """,
    bad="""
    # both.csv has 4 ranks and sends microbatch 1 the other way: stage 0 on ranks 0 and 3,
    # stage 3 on ranks 1 and 2
    [model]
    tied = true
    [pipeline]
    schedule = "file"
    file = "both.csv"
    """,
    fixed="""
    # both.csv has 4 ranks and sends microbatch 1 the other way: stages 0 and 3 on ranks 0 and 3
    [model]
    tied = true
    [pipeline]
    schedule = "file"
    file = "both.csv"
    """,
)

UNIT_TIMES_READABLE = Rule(
    id="unit-times-readable",
    why="""
    Measured times of blocks, embedding and head are a JSON file that `echelon calibrate RUN`
    writes. Each has seconds of F, B, W and BW, all of them at least zero.
    """,
    example="""
    [pipeline]
    %s
    """,
    bad='times = "notes.txt"',
    fixed='times = "times.json"        # echelon calibrate run.toml --out times.json',
)

UNIT_TIMES_FIT_RUN = Rule(
    id="unit-times-fit-run",
    why="""
    How long a block takes depends on its widths, on the microbatch, the sequence and the dtype, and
    on how many tensor ranks share it. Times that were measured for other ones would balance another
    model. The number of blocks may differ: they are alike. And it depends on the device: times of
    CPU cores say nothing about a cluster of GPUs, whose links they would be added to.
    """,
    example="""
    # times.json was measured with microbatches of 2 sequences
    [pipeline]
    times = "times.json"
    [batch]
    %s
    """,
    bad="microbatch_sequences = 4",
    fixed="microbatch_sequences = 2",
)

UNIT_TIMES_WRITTEN_ONCE = Rule(
    id="unit-times-written-once",
    why="A file of measured times is never overwritten: plans may have been made by it.",
    bad="echelon calibrate run.toml --out times.json     # times.json is there",
    fixed="echelon calibrate run.toml --out again.json",
)


SCHEDULE_AREA = Area("schedule")
"""Pipeline schedules: which exist, what they need, and what a legal one looks like."""

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


SCHEDULE_FILE_AREA = Area("schedule_file")
"""A schedule that somebody wrote: the file, and what its ranks may hold."""

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


SCHEDULE_SEARCH_AREA = Area("schedule_search")
"""The search for a schedule."""

SCHEDULE_SEARCH_HAS_MEMORY = Rule(
    id="schedule-search-has-memory",
    why="""
    `most_in_flight` is the most (stage, microbatch) pairs whose activations one rank may hold. A
    microbatch comes back to a rank only after it has crossed all later stages, so just before its
    first backward pass there the rank holds it once for each of its stages, whatever the order.
    With a lower limit no schedule exists.
    """,
    example="""
    [mesh]
    pp = 2
    [pipeline]
    schedule = "auto"
    virtual_stages = 2
    %s
    """,
    bad="most_in_flight = 1          # each rank has 2 stages",
    fixed="most_in_flight = 2",
)
