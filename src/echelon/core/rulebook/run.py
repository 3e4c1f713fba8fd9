# SPDX-License-Identifier: Apache-2.0
"""Rules about runs: checkpoints, the folder of a run, training, observation, generation."""

from echelon.core.rules import Area, Rule

CHECKPOINT_AREA = Area("checkpoint")
"""Checkpoints: what is written, and what a run may be resumed from."""

CHECKPOINT_EXISTS = Rule(
    id="checkpoint-exists",
    why="""
    Whoever asks to resume has work to lose. A path without a committed checkpoint is an error that
    lists what is there; training never starts from nothing in its place.
    """,
    bad="echelon train run.toml --resume runs/nano-2     # the run is called nano-1",
    fixed="echelon train run.toml --resume runs/nano-1",
)

CHECKPOINT_COMPLETE = Rule(
    id="checkpoint-complete",
    why="""
    index.json names every file of a checkpoint. One that is gone was removed or left behind by a
    copy; the tensors in it are nowhere else.
    """,
    bad="cp runs/nano/checkpoints/step-000500/rank-0000.safetensors elsewhere/",
    fixed="cp -r runs/nano/checkpoints/step-000500 elsewhere/",
)

CHECKPOINT_UNDAMAGED = Rule(
    id="checkpoint-undamaged",
    why="""
    The index keeps the size and the SHA-256 of every file, and its own. All are compared before a
    tensor is used: a flipped bit in a weight raises no error later, it only trains worse.
    """,
    bad="a file of the checkpoint was cut short, edited, or damaged by the disk",
    fixed="--resume with an older checkpoint of the run, or a copy of this one",
)

CHECKPOINT_FILES_INSIDE = Rule(
    id="checkpoint-files-inside",
    why="""
    A checkpoint is one folder, and its index names the files in it by plain names. A name that
    leads out of the folder would make a checkpoint from elsewhere read any file of this machine.
    """,
    bad='index.json with the file "../../x.safetensors"',
    fixed='index.json with the file "rank-0000.safetensors"',
)

CHECKPOINT_SCHEMA = Rule(
    id="checkpoint-schema",
    why="""
    A checkpoint names the version of its own format. A newer one may hold what this version of
    Echelon would misread.
    """,
    bad="a checkpoint of schema 3 read by a version that knows schema 2",
    fixed="pip install --upgrade 'echelon-parallel[train]'",
)

CHECKPOINT_SAME_MODEL = Rule(
    id="checkpoint-same-model",
    why="""
    A checkpoint holds whole tensors under canonical names, so it fits any layout of the same model,
    and no other model: names, shapes and dtypes must be equal.
    """,
    bad="--resume RUN --set model.hidden=256     # RUN was trained with 128",
    fixed="--resume RUN",
)

CHECKPOINT_SAME_TOKENIZER = Rule(
    id="checkpoint-same-tokenizer",
    why="""
    A token id means what the tokenizer says. With another tokenizer the weights still load, the
    loss only jumps; so the hash of the tokenizer is part of a checkpoint.
    """,
    bad="--resume RUN --set data.tokenizer=bpe-2048     # RUN was trained on bytes",
    fixed="--resume RUN --set data.tokenizer=bytes",
)

CHECKPOINT_SAME_MATHEMATICS = Rule(
    id="checkpoint-same-mathematics",
    why="""
    A resumed run continues the numbers of the run before it. Degrees, schedule, microbatch and
    recompute may change; the batch, the seed, the precision and the optimizer may not.
    """,
    bad="--resume RUN --set optimizer.learning_rate=1e-3     # RUN was trained with 3e-4",
    fixed="--resume RUN --set mesh.tp=2",
)

CHECKPOINT_WRITTEN_ONCE = Rule(
    id="checkpoint-written-once",
    why="""
    A committed checkpoint is never overwritten: it may be the only good one. A run resumed from an
    older checkpoint would come to a step that is already saved, with other numbers.
    """,
    bad="resuming step 500 in the folder that also holds step 1000",
    fixed="resume the newest checkpoint, or resume the older one as a run of another name",
)

CHECKPOINT_COVERS_TENSORS = Rule(
    id="checkpoint-covers-tensors",
    why="""
    Each element of each tensor is in a checkpoint exactly once. Pieces that leave a hole or overlap
    mean that a rank dropped or repeated part of the model.
    """,
    bad="two tensor-parallel ranks that both say they hold rows 0 to 63 of 128",
    fixed="rows 0 to 63 on one, rows 64 to 127 on the other",
)

CHECKPOINT_SHARED_FOLDER = Rule(
    id="checkpoint-shared-folder",
    why="""
    Each rank writes its own file into one folder, and rank 0 looks at all of them before the
    checkpoint counts. Ranks on several machines need a folder that all of them see.
    """,
    bad="--set train.runs_dir=/tmp/runs     # each machine has its own /tmp",
    fixed="--set train.runs_dir=/shared/runs     # a file system that all machines mount",
)

CHECKPOINT_BASE = Rule(
    id="checkpoint-base",
    why="""
    Where adapters are trained, checkpoints of a run hold what was trained, and the frozen weights
    stand once beside them, in the folder base of checkpoints/. Each checkpoint names it with the
    checksum of its index. So moving or copying a run takes both, and a checkpoint alone, or over
    the base of another run, is no model: it is refused before a tensor is read.
    """,
    bad="cp -r runs/tuned/checkpoints/step-000500 elsewhere/",
    fixed="cp -r runs/tuned/checkpoints/step-000500 runs/tuned/checkpoints/base elsewhere/",
)


RUN_DIRECTORY_AREA = Area("run_directory")
"""The folder that a run writes, and the disk under it."""

RUN_WRITTEN_ONCE = Rule(
    id="run-written-once",
    why="""
    A run is never overwritten. A name that was given by hand must be new; a name that was derived
    from the run file gets a number where it is taken. Several processes of one launch make one
    folder together; where a launcher sets none of the variables that are read, each process takes
    itself for the whole run, and all but the first one end here. `echelon doctor`, started as the
    run is, shows what is read.
    """,
    bad="echelon train run.toml --set train.run_name=nano     # runs/nano is there",
    fixed="echelon train run.toml --resume runs/nano     # or another name",
)

RUN_NOT_IN_USE = Rule(
    id="run-not-in-use",
    why="""
    Two processes that write one run would mix their checkpoints. A run is locked while a process
    trains it; the system drops the lock when the process ends, however it ends.
    """,
    bad="echelon train run.toml --resume runs/nano     # twice at once",
    fixed="wait for the first to end, or give the second a name of its own",
)

RUN_NAME = Rule(
    id="run-name",
    why="A run is one folder in the runs folder, so its name is one plain path component.",
    bad="--set train.run_name=../nano",
    fixed="--set train.run_name=nano",
)

RUN_EXISTS = Rule(
    id="run-exists",
    why="""
    A run to resume or to look at is a folder with a plan.json in it. Anything else is refused, with
    a list of the runs that are there.
    """,
    bad="echelon train run.toml --resume runs/nnao",
    fixed="echelon train run.toml --resume runs/nano",
)

FOLDER_WRITABLE = Rule(
    id="folder-writable",
    why="""
    A run writes its plan, its logs and its checkpoints below the runs folder, and nothing else.
    That folder must be one that this user may write and that is not mounted read-only.
    """,
    bad="--set train.runs_dir=/usr/share/runs",
    fixed="--set train.runs_dir=runs",
)

DISK_WORKS = Rule(
    id="disk-works",
    why="""
    The system refused to read or write a file, for a reason other than space or permission. What
    was committed before is still whole: a checkpoint counts only once all of it is on disk.
    """,
    bad="a disk with read errors, or a network file system that went away",
    fixed="--set train.runs_dir=DIR     # DIR is on a disk that works",
)


TRAIN_AREA = Area("train")
"""A run that has started."""

LOSS_NOT_FINITE = Rule(
    id="loss-not-finite",
    why="""
    A loss or a gradient that is NaN or infinite would spoil every weight. All ranks learn of it in
    the same step, before the optimizer runs, so the weights and the last checkpoint are those of
    the step before. The step is then run once more to find the first module, microbatch and samples
    whose output is not finite, or else the first gradient, on the rank that computed it.
    """,
    bad="--set optimizer.learning_rate=1000",
    fixed="--set optimizer.learning_rate=3e-4 --set optimizer.warmup_steps=100",
)

RESUME_WITHIN_STEPS = Rule(
    id="resume-within-steps",
    why="""
    A resumed run takes the steps that are left. A checkpoint that has taken more steps than the run
    is long leaves none, and its weights are not those that the run would end with.
    """,
    bad="echelon train run.toml --resume runs/first --set train.steps=6     # at step 12 by now",
    fixed="echelon train run.toml --resume runs/first --set train.steps=24",
)

RESUME_SAME_DATA = Rule(
    id="resume-same-data",
    why="""
    Which samples a step reads is a function of the seed, the step and the data. A run that went on
    with other data would read some samples twice and some never, and say nothing of it.
    """,
    bad="echelon train run.toml --resume runs/first --set data.source=another/",
    fixed="echelon train run.toml --resume runs/first",
)


OBSERVE_AREA = Area("observe")
"""Looking at a run: what it must have left behind to be drawn."""

RUN_HAS_EVENTS = Rule(
    id="run-has-events",
    why="""
    A timeline is drawn from what every rank wrote down while it ran: events.jsonl.gz of rank 0 and
    events.rank-NNNN.jsonl.gz of the others. A run with observe.events = false has none, and ranks
    on several hosts without a shared folder leave theirs on their own host.
    """,
    example="""
    %s
    echelon observe runs/nano --schedule
    """,
    bad="echelon train nano --set mesh.pp=2 --set observe.events=false",
    fixed="echelon train nano --set mesh.pp=2",
)

RUN_IS_PIPELINED = Rule(
    id="run-is-pipelined",
    why="""
    The schedule of a pipeline says which rank computes what and when, and its bubble is what ranks
    wait for each other. A run with pp = 1 has neither: each rank computes every microbatch.
    """,
    example="""
    %s
    echelon observe runs/nano --schedule
    """,
    bad="echelon train nano",
    fixed="echelon train nano --set mesh.pp=2",
)

RUN_HAS_EXPERTS = Rule(
    id="run-has-experts",
    why="""
    Which experts are busy is a question about a mixture of experts: a model whose blocks are all
    dense has one MLP per block, which every token meets.
    """,
    bad="""
    echelon train nano
    echelon observe runs/nano --experts
    """,
    fixed="""
    echelon train examples/experts.toml
    echelon observe runs/experts --experts
    """,
)

STEP_RECORDED = Rule(
    id="step-recorded",
    why="""
    A step can be drawn once all its ranks have written the events of the whole step, which they do
    when it ends. A long run keeps every k-th step, so that its events stay within
    observe.events_budget_bytes. Steps are counted from 1, as the step lines count them. A step in
    which ranks ran other actions than the plan's schedule has is not drawn as if it were that
    schedule. The loads of experts are written with every step line (observe.log_every), not in
    every step.
    """,
    bad="echelon observe runs/nano --schedule --step 9000     # it had 2000 steps",
    fixed="echelon observe runs/nano --schedule --step 2000",
)

EVENTS_READABLE = Rule(
    id="events-readable",
    why="""
    Each line of an events file is one event as JSON: kind, name, axis, stage, microbatch, bytes,
    start, end, rank; each of metrics.jsonl, routing.jsonl and of logs/rank-*.jsonl is one entry.
    A kill leaves half a line, or half a gzip member, at the end of a file, which is skipped; any
    other line that cannot be read means that the file was changed or damaged after it was written.
    """,
    bad="zcat runs/nano/events.jsonl.gz | head -c 10000 | gzip > events.jsonl.gz     # put back",
    fixed="the file as the run wrote it",
)

RUN_HAS_METRICS = Rule(
    id="run-has-metrics",
    why="""
    A tracker is given what metrics.jsonl says, which rank 0 writes from the start of the first step
    on. A run that was prepared and never started has none, and ranks on several hosts without a
    shared folder leave it on the host of rank 0.
    """,
    bad="echelon observe runs/nano --mirror tensorboard     # on another host",
    fixed="echelon observe runs/nano --mirror tensorboard     # on the host of rank 0",
)

MIRROR_NOT_IN_USE = Rule(
    id="mirror-not-in-use",
    why="""
    Two processes that mirror one run in one tracker would write each line twice. While a run with
    observe.trackers goes on, its own mirror is at work.
    """,
    bad="echelon observe runs/nano --mirror wandb     # twice at once",
    fixed="wait for the first to end",
)

MIRROR_WORKS = Rule(
    id="mirror-works",
    why="""
    What a tracker's package raises ends the mirror and not the run, whose metrics.jsonl has all of
    it. The mirror knows how far it got, and goes on from there when it is asked again.
    """,
    example="""
    %s
    echelon observe runs/nano --mirror mlflow
    """,
    bad="export MLFLOW_TRACKING_URI=http://localhost:5000     # where no server is",
    fixed="export MLFLOW_TRACKING_URI=http://localhost:8080     # where it is",
)


GENERATE_AREA = Area("generate")
"""Generation: what a prompt may be, how ranks may split it, how tokens are chosen."""

GENERATE_HAS_PROMPT = Rule(
    id="generate-has-prompt",
    why="""
    A model says what comes next after at least one token. A prompt without any gives it nothing to
    read, and there is no token that every tokenizer begins a text with.
    """,
    bad="echelon generate runs/nano --prompt ''",
    fixed="echelon generate runs/nano --prompt 'def '",
)

GENERATE_FITS_POSITIONS = Rule(
    id="generate-fits-positions",
    why="""
    A model has been made for so many positions. A learned table has no row for the next one, and
    rotations by angles that no training has shown give text without sense. The last token that is
    written is not read, so a prompt of p tokens and n written ones take p + n - 1 positions.
    """,
    bad="echelon generate runs/nano --prompt 'def ' --max-tokens 1022     # 4 + 1021 of 1024",
    fixed="echelon generate runs/nano --prompt 'def ' --max-tokens 1021",
)

GENERATE_SETTINGS = Rule(
    id="generate-settings",
    why="""
    A checkpoint says which model it is. Generation chooses only how ranks split it: mesh.tp,
    mesh.pp, mesh.ep, experts.expert_tp, and mesh.dp_replicate, whose ranks share out the prompts.
    Nothing is sharded over dp_shard, for there are no gradients and no optimizer; cp would cut
    prompts, whose keys are split by heads and by blocks already. All others are of training.
    """,
    bad="echelon generate runs/nano --prompt 'def ' --set mesh.cp=2",
    fixed="echelon generate runs/nano --prompt 'def ' --set mesh.tp=2",
)

GENERATE_EXPERTS = Rule(
    id="generate-experts",
    why="""
    Every tensor rank has all tokens, so none travels to an expert: a rank computes what its own
    experts make of them, and the ranks sum. For that the tensor ranks hold each expert once (ep =
    tp), hold a piece of each (expert_tp = tp), or hold all of them (both 1).
    """,
    bad="echelon generate RUN --prompt 'def ' --set mesh.tp=4 --set mesh.ep=2",
    fixed="echelon generate RUN --prompt 'def ' --set mesh.tp=4 --set mesh.ep=4",
)

GENERATE_SHARES_PROMPTS = Rule(
    id="generate-shares-prompts",
    why="""
    Ranks of dp_replicate have the same weights and share out the prompts. One that gets no prompt
    would hold a whole model and do nothing.
    """,
    bad="echelon generate runs/nano --prompt 'def ' --set mesh.dp_replicate=2",
    fixed="echelon generate runs/nano --prompt 'def ' --prompt 'class ' --set mesh.dp_replicate=2",
)

GENERATE_CAUSAL = Rule(
    id="generate-causal",
    why="""
    Text is written from left to right: the keys of what has been read stay as they are. In a model
    whose queries also meet later keys every new token would change all of them.
    """,
    bad="a model with causal = false",
    fixed="a model with causal = true",
)

GENERATE_SAMPLING = Rule(
    id="generate-sampling",
    why="""
    Logits are divided by the temperature; at 0 the likeliest token is taken, and what limits a draw
    (top_k, top_p) has no effect. top_p is a probability, the others are counts of at least 1.
    """,
    bad="echelon generate runs/nano --prompt 'def ' --temperature 0 --top-k 5",
    fixed="echelon generate runs/nano --prompt 'def ' --temperature 0.8 --top-k 5",
)
