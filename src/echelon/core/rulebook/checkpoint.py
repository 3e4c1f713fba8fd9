# SPDX-License-Identifier: Apache-2.0
"""Rules about checkpoints: what is written, and what a run may be resumed from."""

from echelon.core.rules import Rule

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
