"""The tables and keys of run.toml: what each takes, its default, and what it is for.

This table is the only list of settings: loading, checking, `echelon config show` and the resolved
run.toml of a run all read it. A default of None means that there is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from echelon.config.kinds import Choice, Flag, Integer, Kind, Real, StageLists, Text
from echelon.core.rulebook.mesh import DEGREE_AT_LEAST_ONE

DTYPES = ("fp64", "fp32", "bf16", "fp16")

DEGREE = Integer(rule=DEGREE_AT_LEAST_ONE, maximum=2**20)
COUNT = Integer()
FROM_ZERO = Integer(minimum=0)
POSITIVE = Real(above=True)
FRACTION = Real(below=True, maximum=1.0)
DTYPE = Choice(options=DTYPES)
OFFLOAD = Choice(options=("none", "host", "nvme"))
AT_LEAST_TWO = Integer(minimum=2, maximum=10_000)
LOSS_SCALE = Real(above=True, maximum=2.0**32)
EXPERT_COUNT = Integer(minimum=2, maximum=10_000)
EVERY = Integer(words=("never",))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Describe one setting; a `path` is relative to the file that sets it."""

    key: str
    kind: Kind
    default: object
    about: str
    path: bool = False

    @property
    def table(self) -> str:
        """Return the dotted name of the table that holds the setting ("" for none)."""
        return self.key.rpartition(".")[0]


def _setting(key: str, kind: Kind, default: object, about: str, *, path: bool = False) -> Setting:
    return Setting(key=key, kind=kind, default=default, about=about, path=path)


_EXTENDS = (
    _setting("extends", Text(), None, "a preset, or a run file relative to this one, to build on"),
)

_MODEL = (
    _setting("model.preset", Text(), None, "a model by name: echelon config presets"),
    _setting("model.hf_config", Text(), None, "a Hugging Face config.json", path=True),
    _setting("model.name", Text(), None, "what reports call the model"),
    _setting("model.layers", Integer(maximum=10_000), None, "number of blocks"),
    _setting("model.hidden", COUNT, None, "width of the residual stream"),
    _setting("model.heads", Integer(maximum=2**20), None, "number of query heads"),
    _setting("model.kv_heads", COUNT, None, "number of key/value heads; else as many as heads"),
    _setting("model.head_dim", COUNT, None, "width of a head; else hidden / heads"),
    _setting("model.ffn", COUNT, None, "inner width of the dense MLP"),
    _setting("model.vocab", COUNT, None, "number of token ids"),
    _setting("model.max_positions", COUNT, None, "longest sequence"),
    _setting("model.gated", Flag(), True, "whether the MLP has a gate (SwiGLU)"),
    _setting("model.activation", Choice(options=("silu", "gelu")), "silu", "gelu is the tanh form"),
    _setting("model.tied", Flag(), False, "whether the head is the embedding"),
    _setting("model.norm", Choice(options=("rmsnorm", "layernorm")), "rmsnorm", "kind of norm"),
    _setting("model.norm_eps", POSITIVE, 1e-5, "added to the variance in a norm"),
    _setting("model.positions", Choice(options=("rope", "learned")), "rope", "how order enters"),
    _setting("model.rope_theta", POSITIVE, 10_000.0, "base of the rotary frequencies"),
    _setting("model.qk_norm", Flag(), False, "whether queries and keys are normed per head"),
    _setting("model.qkv_bias", Flag(), False, "whether q, k and v have a bias"),
    _setting("model.output_bias", Flag(), False, "whether attention's output has a bias"),
    _setting("model.mlp_bias", Flag(), False, "whether the MLP has biases"),
    _setting("model.initial_std", POSITIVE, 0.02, "standard deviation of the first weights"),
    _setting("model.dropout", FRACTION, 0.0, "of embeddings and of both outputs of a block"),
)

_ROPE_SCALING = (
    _setting("model.rope_scaling.factor", Real(minimum=1.0), None, "how far low ones stretch"),
    _setting("model.rope_scaling.low_frequency_factor", POSITIVE, None, "turns: stretch below"),
    _setting("model.rope_scaling.high_frequency_factor", POSITIVE, None, "turns: keep above"),
    _setting("model.rope_scaling.original_positions", COUNT, None, "positions before stretching"),
)

_LATENT = (
    _setting("model.latent.query_rank", COUNT, None, "rank of the query projection"),
    _setting("model.latent.kv_rank", COUNT, None, "rank of the key/value projection"),
    _setting("model.latent.nope_dim", COUNT, None, "head dim without rotary positions"),
    _setting("model.latent.rope_dim", COUNT, None, "head dim with rotary positions"),
    _setting("model.latent.value_dim", COUNT, None, "head dim of the values"),
)

_MODEL_EXPERTS = (
    _setting("model.experts.num_experts", EXPERT_COUNT, None, "routed experts per block"),
    _setting("model.experts.top_k", COUNT, None, "experts that a token meets"),
    _setting("model.experts.ffn", COUNT, None, "inner width of one expert"),
    _setting("model.experts.shared_experts", FROM_ZERO, 0, "experts that every token meets"),
    _setting("model.experts.first_dense_layers", FROM_ZERO, 0, "blocks with a dense MLP first"),
    _setting(
        "model.experts.router", Choice(options=("softmax", "sigmoid")), "softmax", "of the scores"
    ),
    _setting("model.experts.router_bias", Flag(), False, "a bias that balances without a loss"),
)

_CLUSTER = (
    _setting("cluster.preset", Text(), None, "laptop, or COUNTxDEVICE such as 8xh100"),
    _setting("cluster.file", Text(), None, "a cluster described in TOML", path=True),
)

_MESH = (
    _setting("mesh.pp", DEGREE, 1, "pipeline stages"),
    _setting("mesh.dp_replicate", DEGREE, 1, "replicas of the whole model"),
    _setting("mesh.dp_shard", DEGREE, 1, "data ranks that share out ZeRO's pieces"),
    _setting("mesh.cp", DEGREE, 1, "pieces of a sequence (context parallel)"),
    _setting("mesh.tp", DEGREE, 1, "pieces of a matrix (tensor parallel)"),
    _setting("mesh.ep", DEGREE, 1, "groups of experts, folded over the data ranks"),
    _setting("mesh.sequence_parallel", Flag(), False, "split norms and residuals over tp too"),
)

_ZERO = (
    _setting(
        "zero.stage", Integer(minimum=0, maximum=3), 0, "what data ranks share out: nothing at 0"
    ),
    _setting("zero.bucket_bytes", COUNT, 25 * 2**20, "gradients that are reduced together"),
    _setting(
        "zero.accumulate",
        Choice(options=("auto", "whole", "slices")),
        "auto",
        "how gradients of microbatches add up; auto: slices from stage 2 on",
    ),
    _setting(
        "zero.reshard_after_forward",
        Choice(options=("auto", "always", "never")),
        "auto",
        "at stage 3: whether a unit is gathered again for backward",
    ),
    _setting("zero.prefetch", Integer(minimum=0, maximum=10_000), 1, "units gathered ahead"),
    _setting("zero.unit_blocks", Integer(maximum=10_000), 1, "blocks gathered together"),
    _setting("zero.keep_whole_below", FROM_ZERO, 0, "elements: smaller parameters are not cut"),
    _setting("zero.optimizer_offload", OFFLOAD, "none", "where optimizer state rests"),
    _setting("zero.parameter_offload", OFFLOAD, "none", "where slices of parameters rest"),
    _setting("zero.offload_dir", Text(), "none", "folder of the files of nvme", path=True),
    _setting("zero.offload_buffers", AT_LEAST_TWO, 2, "with nvme: buckets in memory at once"),
)

_LAYOUT = (
    _setting("pipeline.schedule", Text(), "1f1b", "order of forward and backward passes"),
    _setting("pipeline.virtual_stages", COUNT, 1, "stages on each pipeline rank"),
    _setting(
        "pipeline.stages",
        StageLists(),
        "auto",
        "the blocks of each stage; auto: balanced by time, even: by number",
    ),
    _setting("pipeline.file", Text(), "none", "with schedule = file: CSV or JSON", path=True),
    _setting("pipeline.times", Text(), "none", "of units: echelon calibrate --model", path=True),
    _setting(
        "pipeline.most_in_flight",
        Integer(words=("auto",)),
        "auto",
        "with schedule = auto or file: stages x microbatches held by a rank",
    ),
    _setting(
        "recompute.policy", Choice(options=("none", "selective", "full")), "none", "what is redone"
    ),
    _setting("recompute.every", COUNT, 1, "with full: every how many blocks"),
    _setting(
        "recompute.offload",
        Choice(options=("none", "host")),
        "none",
        "with full: where stored inputs wait for backward",
    ),
    _setting(
        "context.kind",
        Choice(options=("ring", "striped", "gathered", "ulysses", "ulysses-ring")),
        "ring",
        "how attention meets the other pieces of a sequence",
    ),
    _setting("experts.capacity_factor", Real(above=True, words=("dropless",)), "dropless", "room"),
    _setting("experts.balance", Choice(options=("none", "aux", "bias")), "none", "of the router"),
    _setting("experts.expert_tp", DEGREE, 1, "pieces of one expert"),
)

_MATHEMATICS = (
    _setting("batch.global_sequences", COUNT, None, "sequences of one optimizer step"),
    _setting("batch.microbatch_sequences", COUNT, 1, "sequences of one forward pass of one rank"),
    _setting("batch.sequence_length", COUNT, None, "tokens of a sequence"),
    _setting("precision.parameters", DTYPE, "fp32", "in forward and backward"),
    _setting("precision.gradients", DTYPE, "fp32", "as they accumulate"),
    _setting("precision.reduction", DTYPE, "fp32", "as they are summed over ranks"),
    _setting("precision.master", DTYPE, "fp32", "of the copy that the optimizer updates"),
    _setting(
        "precision.loss_scaling",
        Choice(options=("none", "dynamic", "fixed")),
        "none",
        "what keeps fp16 gradients above zero",
    ),
    _setting("precision.loss_scale", LOSS_SCALE, 65536.0, "factor of the loss, at first"),
    _setting("precision.loss_scale_window", COUNT, 1000, "dynamic: steps until it doubles"),
    _setting("precision.loss_scale_min", LOSS_SCALE, 1.0, "dynamic: it never falls below"),
    _setting("precision.loss_scale_hysteresis", COUNT, 1, "dynamic: overflows until it halves"),
    _setting("optimizer.kind", Choice(options=("adamw", "sgd", "muon")), "adamw", "the update"),
    _setting("optimizer.learning_rate", POSITIVE, 3e-4, "at its peak"),
    _setting("optimizer.beta1", FRACTION, 0.9, "decay of the first moment"),
    _setting("optimizer.beta2", FRACTION, 0.95, "decay of the second moment"),
    _setting("optimizer.eps", POSITIVE, 1e-8, "added to the root of the second moment"),
    _setting("optimizer.momentum", FRACTION, 0.95, "of sgd and muon"),
    _setting(
        "optimizer.newton_schulz_steps", Integer(maximum=100), 5, "of muon's orthogonalisation"
    ),
    _setting("optimizer.weight_decay", Real(), 0.1, "of what optimizer.decay names"),
    _setting(
        "optimizer.decay",
        Choice(options=("matrices", "blocks", "all")),
        "matrices",
        "what decays: matrices, those of blocks only, or all",
    ),
    _setting(
        "optimizer.clip_norm", Real(above=True, words=("none",)), 1.0, "largest gradient norm"
    ),
    _setting(
        "optimizer.schedule",
        Choice(options=("constant", "linear", "cosine", "wsd")),
        "cosine",
        "of the learning rate after warm-up",
    ),
    _setting("optimizer.warmup_steps", FROM_ZERO, 0, "steps of linear rise"),
    _setting("optimizer.decay_steps", FROM_ZERO, 0, "steps of the fall at the end of wsd"),
    _setting("optimizer.final_ratio", Real(maximum=1.0), 0.1, "last / peak learning rate"),
    _setting(
        "train.seed",
        Integer(minimum=0, maximum=2**63 - 1),
        0,
        "of the first weights, the sample order and dropout",
    ),
)

_RUN = (
    _setting("data.source", Text(), "stdlib", "stdlib, or a file or folder of tokens", path=True),
    _setting("data.tokenizer", Text(), "bytes", "bytes, bpe-N, or a tokenizer.json", path=True),
    _setting("data.validation_fraction", FRACTION, 0.01, "of the tokens, held out"),
    _setting("train.steps", COUNT, 1000, "optimizer steps"),
    _setting(
        "train.weights", Text(), "none", "safetensors file or folder to start from", path=True
    ),
    _setting(
        "train.run_name",
        Text(pattern=r"[A-Za-z0-9][A-Za-z0-9._-]*", means="letters, digits, dots, dashes and _"),
        "auto",
        "folder of the run; auto: the name of the run file or preset",
    ),
    _setting("train.runs_dir", Text(), "runs", "where run folders are made"),
    _setting("train.validate_every", EVERY, "never", "steps between validations; and at the end"),
    _setting("train.validation_batches", COUNT, 8, "global batches per validation"),
    _setting("train.step_timeout_s", POSITIVE, 600.0, "a longer step ends the run"),
    _setting("checkpoint.every", EVERY, "never", "steps between checkpoints"),
    _setting("checkpoint.keep", Integer(words=("all",)), 2, "newest checkpoints that stay"),
    _setting("observe.log_every", COUNT, 1, "steps between step lines"),
    _setting("observe.events", Flag(), True, "whether ranks write what they sent and ran"),
)

SETTINGS: Mapping[str, Setting] = MappingProxyType(
    {
        setting.key: setting
        for group in (
            _EXTENDS,
            _MODEL,
            _ROPE_SCALING,
            _LATENT,
            _MODEL_EXPERTS,
            _CLUSTER,
            _MESH,
            _ZERO,
            _LAYOUT,
            _MATHEMATICS,
            _RUN,
        )
        for setting in group
    }
)
"""Every setting by its key, in the order in which a run file lists them."""

MODEL_SOURCES = ("model.preset", "model.hf_config")
CLUSTER_SOURCES = ("cluster.preset", "cluster.file")


def tables(settings: Mapping[str, Setting] = SETTINGS) -> tuple[str, ...]:
    """Return the dotted names of all tables, such as ``mesh`` and ``model.experts``."""
    names = dict.fromkeys(key.rpartition(".")[0] for key in settings)
    return tuple(name for name in names if name)
