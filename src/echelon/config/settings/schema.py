# SPDX-License-Identifier: Apache-2.0
"""The tables and keys of run.toml: what each takes, its default, and what it is for.

This table is the only list of settings: loading, checking, `echelon config show` and the resolved
run.toml of a run all read it. A default of None means that there is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from echelon.config.settings.list_types import NO_MIXTURE, ChoiceList, MixtureList
from echelon.config.settings.model_tables import EXPERTS, LORA, MODEL_TABLES
from echelon.config.settings.value_types import (
    AT_LEAST_TWO,
    AUTO_BYTES,
    BYTES,
    COUNT,
    DEGREE,
    DTYPE,
    EVERY,
    FRACTION,
    FROM_ZERO,
    LOSS_SCALE,
    NUMBERS_OR_ZERO,
    OFFLOAD,
    OPTIONAL_REAL,
    POSITIVE,
    SECONDS,
    SECONDS_OR_ZERO,
    Choice,
    Flag,
    Integer,
    Real,
    Setting,
    StageLists,
    Text,
    setting,
)
from echelon.core.choices.collective_algorithms import COLLECTIVE_ALGORITHMS
from echelon.core.choices.context_kinds import CONTEXT_KINDS, PLAIN_CONTEXT_KIND
from echelon.core.choices.kernels import ATTENTION_KERNELS, FUSED_PIECES
from echelon.core.choices.local_sgd import DEFAULT_RESTARTS
from echelon.core.choices.optimizers import OPTIMIZERS, PLAIN_OPTIMIZER
from echelon.core.choices.trackers import TRACKERS
from echelon.core.choices.updates import DEFAULT_MAX_STALENESS

_EXTENDS = (
    setting("extends", Text(), None, "a preset, or a run file relative to this one, to build on"),
)

_CLUSTER = (
    setting("cluster.preset", Text(), None, "laptop, or COUNTxDEVICE such as 8xh100"),
    setting("cluster.file", Text(), None, "a cluster described in TOML", path=True),
)

_MESH = (
    setting("mesh.pp", DEGREE, 1, "pipeline stages"),
    setting("mesh.dp_replicate", DEGREE, 1, "replicas of the whole model"),
    setting("mesh.dp_shard", DEGREE, 1, "data ranks that share out ZeRO's pieces"),
    setting("mesh.cp", DEGREE, 1, "pieces of a sequence (context parallel)"),
    setting("mesh.tp", DEGREE, 1, "pieces of a matrix (tensor parallel)"),
    setting("mesh.ep", DEGREE, 1, "shares of the experts, folded over dp_shard x cp (x tp)"),
    setting("mesh.sequence_parallel", Flag(), False, "split norms and residuals over tp too"),
    setting(
        "mesh.tp_overlap",
        Choice(options=("none", "ring", "symmetric-memory", "auto")),
        "none",
        "how products over tp run beside the messages of their own rows, chunk by chunk",
    ),
)

_SERVERS = (
    setting(
        "servers.count",
        Integer(minimum=0, maximum=10_000),
        0,
        "parameter servers beside the mesh: ranks that keep the model and update it",
    ),
    setting(
        "servers.updates",
        Choice(options=("synchronous", "asynchronous")),
        "synchronous",
        "asynchronous: each worker's gradient is applied as it comes",
    ),
    setting(
        "servers.max_staleness",
        Integer(minimum=0, maximum=10_000),
        DEFAULT_MAX_STALENESS,
        "asynchronous: steps that a worker may be ahead of the slowest; 0: as synchronous",
    ),
    setting(
        "servers.damping",
        Real(maximum=10.0),
        0.0,
        "asynchronous: the learning rate is divided by (1 + staleness) to this power",
    ),
)

_ZERO = (
    setting(
        "zero.stage", Integer(minimum=0, maximum=3), 0, "what data ranks share out: nothing at 0"
    ),
    setting(
        "zero.bucket_bytes",
        AUTO_BYTES,
        "auto",
        "gradients that are reduced together; auto: more over more data ranks of GPUs",
    ),
    setting(
        "zero.accumulate",
        Choice(options=("auto", "whole", "slices")),
        "auto",
        "how gradients of microbatches add up; auto: slices from stage 2 on",
    ),
    setting(
        "zero.reshard_after_forward",
        Choice(options=("auto", "always", "never")),
        "auto",
        "at stage 3: whether a unit is gathered again for backward",
    ),
    setting("zero.prefetch", Integer(minimum=0, maximum=10_000), 1, "units gathered ahead"),
    setting("zero.unit_blocks", Integer(maximum=10_000), 1, "blocks gathered together"),
    setting(
        "zero.keep_whole_below", NUMBERS_OR_ZERO, 0, "elements: smaller parameters are not cut"
    ),
    setting(
        "zero.secondary",
        Flag(),
        False,
        "at stage 3: slices of what was gathered stay in each node, where it is gathered again",
    ),
    setting(
        "zero.gather",
        Choice(options=("parameters", "fp8", "int8")),
        "parameters",
        "at stage 3: gather parameters, codes of weights multiplied in 8 bits, or rounded matrices",
    ),
    setting("zero.int8_block", COUNT, 128, "int8: numbers of a row that share a scale"),
    setting(
        "zero.reduce",
        Choice(options=("exact", "int8", "int4")),
        "exact",
        "how gradients are summed into slices: exactly, or rounded, in nodes and then across them",
    ),
    setting("zero.optimizer_offload", OFFLOAD, "none", "where optimizer state rests"),
    setting("zero.parameter_offload", OFFLOAD, "none", "where slices of parameters rest"),
    setting("zero.offload_dir", Text(), "none", "folder of the files of nvme", path=True),
    setting("zero.offload_buffers", AT_LEAST_TWO, 2, "with nvme: buckets in memory at once"),
)

_LAYOUT = (
    setting("pipeline.schedule", Text(), "1f1b", "order of forward and backward passes"),
    setting("pipeline.virtual_stages", COUNT, 1, "stages on each pipeline rank"),
    setting(
        "pipeline.stages",
        StageLists(),
        "auto",
        "the blocks of each stage; auto: balanced by time, even: by number",
    ),
    setting("pipeline.file", Text(), "none", "with schedule = file: CSV or JSON", path=True),
    setting("pipeline.times", Text(), "none", "of units: echelon calibrate RUN", path=True),
    setting(
        "pipeline.most_in_flight",
        Integer(words=("auto",)),
        "auto",
        "with schedule = auto or file: stages x microbatches held by a rank",
    ),
    setting(
        "recompute.policy",
        Choice(options=("none", "selective", "full")),
        "none",
        "what is redone: nothing, operators of blocks, or blocks",
    ),
    setting(
        "recompute.operators",
        ChoiceList(options=("norm", "activation", "mlp", "attention")),
        "auto",
        "redone in blocks not redone whole; auto: norm and activation with selective",
    ),
    setting("recompute.every", COUNT, 1, "with full: every how many blocks"),
    setting(
        "recompute.offload",
        Choice(options=("none", "host")),
        "none",
        "with full: where stored inputs wait for backward",
    ),
    setting(
        "context.kind",
        Choice(options=CONTEXT_KINDS),
        PLAIN_CONTEXT_KIND,
        "how attention meets the other pieces of a sequence",
    ),
    setting(
        "context.ulysses_degree",
        Integer(words=("auto",)),
        "auto",
        "with ulysses-ring: ranks that exchange heads, neighbours; the ring has cp / this many",
    ),
    setting(
        "context.attention",
        Choice(options=("auto", *ATTENTION_KERNELS)),
        "auto",
        "the kernel that computes attention; auto: the fastest that takes the run",
    ),
    *EXPERTS,
    setting(
        "kernels.provider",
        Choice(options=("auto", "plain", "triton", "compiled")),
        "auto",
        "what computes norms, rotations and the like; auto: triton on GPUs, plain on CPUs",
    ),
    setting(
        "kernels.fused",
        ChoiceList(options=FUSED_PIECES),
        "auto",
        "the pieces that are one kernel each; auto: those that the run has",
    ),
    setting(
        "collectives.algorithm",
        Choice(options=("auto", *COLLECTIVE_ALGORITHMS)),
        "auto",
        "how ranks sum and gather; auto: hierarchical over Gloo where that is faster, else backend",
    ),
)

_MATHEMATICS = (
    setting("batch.global_sequences", COUNT, None, "sequences of one optimizer step"),
    setting("batch.microbatch_sequences", COUNT, 1, "sequences of one forward pass of one rank"),
    setting("batch.sequence_length", COUNT, None, "tokens of a sequence"),
    setting(
        "batch.documents",
        Choice(options=("joined", "separate")),
        "joined",
        "separate: attention stays inside each document",
    ),
    setting(
        "precision.parameters",
        DTYPE,
        "fp32",
        "in forward and backward; bf16 if a run sets no dtype and its devices have it",
    ),
    setting("precision.gradients", DTYPE, "fp32", "as they accumulate"),
    setting("precision.reduction", DTYPE, "fp32", "as they are summed over ranks"),
    setting("precision.master", DTYPE, "fp32", "of the copy that the optimizer updates"),
    setting(
        "precision.loss_scaling",
        Choice(options=("none", "dynamic", "fixed")),
        "none",
        "what keeps fp16 gradients above zero",
    ),
    setting("precision.loss_scale", LOSS_SCALE, 65536.0, "factor of the loss, at first"),
    setting("precision.loss_scale_window", COUNT, 1000, "dynamic: steps until it doubles"),
    setting("precision.loss_scale_min", LOSS_SCALE, 1.0, "dynamic: it never falls below"),
    setting("precision.loss_scale_hysteresis", COUNT, 1, "dynamic: overflows until it halves"),
    setting(
        "precision.matmul",
        Choice(options=("parameters", "fp8")),
        "parameters",
        "what linear layers of blocks multiply",
    ),
    setting("precision.fp8_block", COUNT, 128, "fp8: numbers of a row that share a scale"),
    setting(
        "precision.fp8_scales",
        Choice(options=("block", "tensor")),
        "block",
        "fp8: what shares a scale",
    ),
    setting("precision.fp8_history", COUNT, 16, "fp8: steps that scales of tensors look back on"),
    setting(
        "precision.fp8_gradients",
        Choice(options=("e4m3", "e5m2", "auto")),
        "auto",
        "fp8: format of the gradients of outputs",
    ),
    setting("optimizer.kind", Choice(options=OPTIMIZERS), PLAIN_OPTIMIZER, "the update"),
    setting("optimizer.learning_rate", POSITIVE, 3e-4, "at its peak"),
    setting("optimizer.beta1", FRACTION, 0.9, "decay of the first moment"),
    setting("optimizer.beta2", FRACTION, 0.95, "decay of the second moment"),
    setting("optimizer.eps", POSITIVE, 1e-8, "added to the root of the second moment"),
    setting("optimizer.momentum", FRACTION, 0.95, "of sgd and muon"),
    setting(
        "optimizer.newton_schulz_steps", Integer(maximum=100), 5, "of muon's orthogonalisation"
    ),
    setting("optimizer.weight_decay", Real(), 0.1, "of what optimizer.decay names"),
    setting(
        "optimizer.decay",
        Choice(options=("matrices", "blocks", "all")),
        "matrices",
        "what decays: matrices, those of blocks only, or all",
    ),
    setting("optimizer.clip_norm", OPTIONAL_REAL, 1.0, "largest gradient norm"),
    setting(
        "optimizer.schedule",
        Choice(options=("constant", "linear", "cosine", "wsd")),
        "cosine",
        "of the learning rate after warm-up",
    ),
    setting("optimizer.warmup_steps", FROM_ZERO, 0, "steps of linear rise"),
    setting("optimizer.decay_steps", FROM_ZERO, 0, "steps of the fall at the end of wsd"),
    setting("optimizer.final_ratio", Real(maximum=1.0), 0.1, "last / peak learning rate"),
    setting(
        "train.seed",
        Integer(minimum=0, maximum=2**63 - 1),
        0,
        "of the first weights, the sample order and dropout",
    ),
)

_LOCAL_SGD = (
    setting(
        "local_sgd.every", FROM_ZERO, 0, "steps that replicas train alone between meetings; 0: none"
    ),
    setting(
        "local_sgd.islands",
        Integer(words=("auto",)),
        "auto",
        "replicas that train alone: dp_replicate",
    ),
    setting(
        "local_sgd.outer",
        Choice(options=("sgd", "nesterov")),
        "nesterov",
        "the step from the mean of what islands moved",
    ),
    setting(
        "local_sgd.outer_learning_rate",
        Real(above=True, words=("auto",)),
        "auto",
        "of the outer step; auto: 0.7 with nesterov, 1 with sgd",
    ),
    setting(
        "local_sgd.outer_momentum",
        Real(below=True, maximum=1.0, words=("auto",)),
        "auto",
        "of nesterov, per round; auto: 0.9",
    ),
    setting(
        "local_sgd.gradients",
        Choice(options=("fp32", "int8", "fp8")),
        "fp32",
        "what islands send: differences, or codes of 8 bits",
    ),
    setting("local_sgd.fragments", COUNT, 1, "parts of the model that meet in steps of their own"),
    setting("local_sgd.delay", FROM_ZERO, 0, "steps from a meeting to its outer step"),
    setting(
        "local_sgd.min_islands",
        Integer(words=("all",)),
        "all",
        "with fewer islands the run ends; others are left out when they are lost",
    ),
    setting(
        "local_sgd.restarts",
        FROM_ZERO,
        DEFAULT_RESTARTS,
        "times that each lost island is started again, where min_islands lets the run go on",
    ),
)

_RUN = (
    setting(
        "data.source",
        Text(),
        "stdlib",
        "stdlib, text, prepared data, or a URL; training needs it named",
        path=True,
    ),
    setting(
        "data.mixture",
        MixtureList(),
        NO_MIXTURE,
        "sources with weights, which may change at a step; in the place of data.source",
    ),
    setting("data.tokenizer", Text(), "bytes", "bytes, bpe-N, or a tokenizer.json", path=True),
    setting("data.validation_fraction", FRACTION, 0.01, "of the tokens, held out"),
    setting(
        "data.epoch_end",
        Choice(options=("continue", "pad")),
        "continue",
        "a last batch that lacks samples goes on with the next epoch, or repeats some of its own",
    ),
    setting(
        "data.train_on",
        Choice(options=("all", "answers")),
        "all",
        "which tokens count in the loss: all, or those of the answers of chats",
    ),
    setting("train.steps", COUNT, 1000, "optimizer steps"),
    setting("train.weights", Text(), "none", "safetensors file or folder to start from", path=True),
    setting(
        "train.weights_optimizer",
        Flag(),
        False,
        "go on from the optimizer state and the step of train.weights, a trainer's checkpoint",
    ),
    setting("train.adapters", Text(), "none", "folder of PEFT's adapters to start from", path=True),
    setting(
        "train.run_name",
        Text(pattern=r"[A-Za-z0-9][A-Za-z0-9._-]*", means="letters, digits, dots, dashes and _"),
        "auto",
        "folder of the run; auto: the name of the run file or preset",
    ),
    setting("train.runs_dir", Text(), "runs", "where run folders are made"),
    setting("train.validate_every", EVERY, "never", "steps between validations; and at the end"),
    setting("train.validation_batches", COUNT, 8, "global batches per validation"),
    setting("train.step_timeout_s", SECONDS, 600.0, "a longer step ends the run"),
    setting(
        "train.desync_after_s",
        SECONDS_OR_ZERO,
        10.0,
        "seconds of waiting after which the calls of ranks are compared; 0: never",
    ),
    setting("checkpoint.every", EVERY, "never", "steps between checkpoints"),
    setting("checkpoint.keep", Integer(words=("all",)), 2, "newest checkpoints that stay"),
    setting(
        "observe.log_every",
        Integer(words=("auto",)),
        "auto",
        "steps between step lines; auto: 200 lines a run at most",
    ),
    setting("observe.events", Flag(), True, "whether ranks write what they sent and ran"),
    setting(
        "observe.events_budget_bytes",
        BYTES,
        50_000_000,
        "of the events of all ranks; a longer run keeps every k-th step",
    ),
    setting(
        "observe.trackers",
        ChoiceList(options=tuple(TRACKERS), words=("none",)),
        "none",
        "tools that mirror metrics.jsonl, in processes of their own",
    ),
    setting("observe.tracker_project", Text(), "echelon", "project or experiment of these tools"),
    setting(
        "observe.tracker_drain_s",
        SECONDS,
        30.0,
        "seconds that they have after the run for what is left",
    ),
)

_TABLES = (
    _EXTENDS,
    MODEL_TABLES,
    LORA,
    _CLUSTER,
    _MESH,
    _SERVERS,
    _ZERO,
    _LAYOUT,
    _MATHEMATICS,
    _LOCAL_SGD,
    _RUN,
)

SETTINGS: Mapping[str, Setting] = MappingProxyType(
    {one.key: one for group in _TABLES for one in group}
)
"""Every setting by its key, in the order in which a run file lists them."""

MODEL_SOURCES = ("model.preset", "model.hf_config")
CLUSTER_SOURCES = ("cluster.preset", "cluster.file")


def tables(settings: Mapping[str, Setting] = SETTINGS) -> tuple[str, ...]:
    """Return the dotted names of all tables, such as ``mesh`` and ``model.experts``."""
    names = dict.fromkeys(key.rpartition(".")[0] for key in settings)
    return tuple(name for name in names if name)
