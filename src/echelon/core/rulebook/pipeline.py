# SPDX-License-Identifier: Apache-2.0
"""Rules about the stages of a pipeline, and the files that say how they run and how long."""

from echelon.core.rules import Rule

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
