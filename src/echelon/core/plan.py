# SPDX-License-Identifier: Apache-2.0
"""The Plan: one frozen value that is planned, proven, trained and compared with reality.

What can change the mathematics (`Mathematics`) and what can only change speed and memory
(`Layout`) are two nested records, so "the same mathematics, another layout" is one comparison.
Nothing in a Plan is "auto": `config/` resolves every choice before it builds one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from echelon.core.attention_mask import Placement
from echelon.core.choices.collective_algorithms import BACKEND, COLLECTIVE_ALGORITHMS
from echelon.core.choices.context_kinds import CONTEXT_KINDS, PLAIN_CONTEXT_KIND, ContextKindRecord
from echelon.core.choices.kernels import AttentionKernel, Kernels
from echelon.core.choices.local_sgd import LocalSgd
from echelon.core.choices.optimizers import OPTIMIZERS, PLAIN_OPTIMIZER
from echelon.core.choices.registry import load_installed_plugins
from echelon.core.choices.updates import Updates
from echelon.core.cluster import Cluster
from echelon.core.experts import Balance, ExpertLayout
from echelon.core.mesh import Mesh
from echelon.core.messages.removed_settings import without_removed
from echelon.core.model_shape import ModelShape
from echelon.core.notebook import NOTEBOOK_VIEWS
from echelon.core.serialize import content_hash, decode_json, from_json, to_json
from echelon.core.settings.configured import Configured
from echelon.core.settings.list_types import ChoiceList
from echelon.core.settings.value_types import (
    AT_LEAST_TWO,
    AUTO_BYTES,
    FRACTION,
    FROM_ZERO,
    LOSS_SCALE,
    NUMBERS_OR_ZERO,
    OPTIONAL_REAL,
    Choice,
    Integer,
    Real,
    StageLists,
)

DType = Literal["fp64", "fp32", "bf16", "fp16"]
DTYPE_BYTES: dict[str, int] = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}

OptimizerKind = Annotated[str, OPTIMIZERS]
DecayRule = Literal["matrices", "blocks", "all"]
LearningRateSchedule = Literal["constant", "linear", "cosine", "wsd"]
LossScaling = Literal["none", "dynamic", "fixed"]
MatmulDType = Literal["parameters", "fp8"]
GatherDType = Literal["parameters", "fp8", "int8"]
ReduceKind = Literal["exact", "int8", "int4"]
Fp8Scales = Literal["block", "tensor"]
Fp8Format = Literal["e4m3", "e5m2"]
ZeroStage = Literal[0, 1, 2, 3]
Accumulation = Literal["whole", "slices"]
OffloadTarget = Literal["none", "host", "nvme"]
RecomputePolicy = Literal["none", "selective", "full"]
RecomputedOperator = Literal["norm", "activation", "mlp", "attention"]
ContextKind = Annotated[str, CONTEXT_KINDS]
Documents = Literal["joined", "separate"]
TensorOverlapKind = Literal["none", "ring", "symmetric-memory"]
CollectiveAlgorithm = Annotated[str, COLLECTIVE_ALGORITHMS]

PLAN_SCHEMA = 8  # of the written JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Give the dtype of parameters, gradients, their reduction, and the master copy."""

    parameters: Annotated[
        DType,
        Configured("in forward and backward; bf16 if a run sets no dtype and its devices have it"),
    ] = "fp32"
    gradients: Annotated[DType, Configured("as they accumulate")] = "fp32"
    reduction: Annotated[DType, Configured("as they are summed over ranks")] = "fp32"
    master: Annotated[DType, Configured("of the copy that the optimizer updates")] = "fp32"
    """Dtype of the copy that the optimizer updates; no copy where it is that of `parameters`."""
    loss_scaling: Annotated[LossScaling, Configured("what keeps fp16 gradients above zero")] = (
        "none"
    )
    """Whether the loss is multiplied before backward: never, by a fixed or by a changing scale."""
    loss_scale: Annotated[float, Configured("factor of the loss, at first", LOSS_SCALE)] = 65536.0
    """The fixed scale, or the one that "dynamic" starts with."""
    loss_scale_window: Annotated[int, Configured("dynamic: steps until it doubles")] = 1000
    loss_scale_min: Annotated[float, Configured("dynamic: it never falls below", LOSS_SCALE)] = 1.0
    loss_scale_hysteresis: Annotated[int, Configured("dynamic: overflows until it halves")] = 1
    matmul: Annotated[MatmulDType, Configured("what linear layers of blocks multiply")] = (
        "parameters"
    )
    """What linear layers of blocks multiply: `parameters`, or these rounded to 8 bits."""
    fp8_block: Annotated[int, Configured("fp8: numbers of a row that share a scale")] = 128
    """Numbers of a row that share a scale in 8 bits, and rows and columns of a weight that do."""
    fp8_scales: Annotated[Fp8Scales, Configured("fp8: what shares a scale")] = "block"
    """What shares a scale in 8 bits: such a block, or a whole tensor of the global batch."""
    fp8_history: Annotated[int, Configured("fp8: steps that scales of tensors look back on")] = 16
    fp8_gradients: Annotated[
        Fp8Format,
        Configured(
            "fp8: format of the gradients of outputs",
            Choice(options=("e4m3", "e5m2", "auto")),
            default="auto",
        ),
    ] = "e4m3"
    """Format of the gradients of outputs in 8 bits; all else is e4m3."""
    int8_block: Annotated[
        int, Configured("int8: numbers of a row that share a scale", default=128, table="zero")
    ] = 0
    """Numbers of a row that share a scale where matrices are used rounded to int8; 0: they are
    not."""

    @property
    def has_master(self) -> bool:
        """Return whether the optimizer updates a copy, not the parameters themselves."""
        return self.master != self.parameters

    @property
    def is_fp8(self) -> bool:
        """Return whether the linear layers of blocks multiply 8-bit numbers."""
        return self.matmul == "fp8"

    @property
    def has_tensor_scales(self) -> bool:
        """Return whether whole tensors share a scale, but in the first step."""
        return self.is_fp8 and self.fp8_scales == "tensor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """Give the optimizer and its learning rate over the steps."""

    kind: Annotated[OptimizerKind, Configured("the update")] = PLAIN_OPTIMIZER
    """A name in `core/choices/optimizers.py`, whose record says which of the fields from `beta1` to
    `newton_schulz_steps` it uses."""
    learning_rate: Annotated[float, Configured("at its peak")] = 3e-4
    beta1: Annotated[float, Configured("decay of the first moment", FRACTION)] = 0.9
    beta2: Annotated[float, Configured("decay of the second moment", FRACTION)] = 0.95
    eps: Annotated[float, Configured("added to the root of the second moment")] = 1e-8
    momentum: Annotated[float, Configured("of sgd and muon", FRACTION)] = 0.95
    newton_schulz_steps: Annotated[
        int, Configured("of muon's orthogonalisation", Integer(maximum=100))
    ] = 5
    weight_decay: Annotated[float, Configured("of what optimizer.decay names", Real())] = 0.1
    """Part of a weight that a step of learning rate 1 takes away."""
    decay: Annotated[
        DecayRule, Configured("what decays: matrices, those of blocks only, or all")
    ] = "matrices"
    clip_norm: Annotated[float | None, Configured("largest gradient norm", OPTIONAL_REAL)] = 1.0
    """Largest norm of all gradients; None leaves gradients as they are."""
    schedule: Annotated[LearningRateSchedule, Configured("of the learning rate after warm-up")] = (
        "cosine"
    )
    """How the learning rate falls after warm-up; "wsd" stays flat and falls linearly at the end."""
    warmup_steps: Annotated[int, Configured("steps of linear rise", FROM_ZERO)] = 0
    decay_steps: Annotated[int, Configured("steps of the fall at the end of wsd", FROM_ZERO)] = 0
    total_steps: int = 1
    """Step at which the learning rate has reached its last value."""
    final_ratio: Annotated[float, Configured("last / peak learning rate", Real(maximum=1.0))] = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Mathematics:
    """Hold everything that can change the numbers of a run."""

    model: ModelShape
    """What is trained."""
    global_sequences: Annotated[int, Configured("sequences of one optimizer step")]
    sequence_length: Annotated[int, Configured("tokens of a sequence")]
    documents: Annotated[
        Documents, Configured("separate: attention stays inside each document")
    ] = "joined"
    seed: Annotated[
        int,
        Configured(
            "of the first weights, the sample order and dropout",
            Integer(minimum=0, maximum=2**63 - 1),
            table="train",
        ),
    ] = 0
    precision: Precision = field(default_factory=Precision)
    """In which dtypes."""
    optimizer: Optimizer = field(default_factory=Optimizer)
    """By which updates."""
    balance: Balance = field(default_factory=Balance)
    """What keeps experts busy."""
    local_sgd: LocalSgd = field(default_factory=LocalSgd)
    """How often replicas meet, where that is not in every step."""
    updates: Updates = field(default_factory=Updates)
    """When parameter servers update, where there are some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Zero:
    """Say what of parameters, gradients and optimizer state data-parallel ranks share out.

    It is cut into slices over `dp_shard` (x `cp`); see Rajbhandari et al., "ZeRO", 2020.
    """

    stage: Annotated[
        ZeroStage,
        Configured("what data ranks share out: nothing at 0", Integer(minimum=0, maximum=3)),
    ] = 0
    """What is cut: nothing at 0, optimizer state at 1, gradients too at 2, parameters too at 3."""
    bucket_bytes: Annotated[
        int,
        Configured(
            "gradients that are reduced together; auto: more over more data ranks of GPUs",
            AUTO_BYTES,
            default="auto",
        ),
    ] = 25 * 2**20
    accumulate: Annotated[
        Accumulation,
        Configured(
            "how gradients of microbatches add up; auto: slices from stage 2 on",
            Choice(options=("auto", "whole", "slices")),
            default="auto",
        ),
    ] = "whole"
    """How gradients of microbatches add up: "whole", and reduced once per step, or in "slices"."""
    reshard_after_forward: Annotated[
        bool,
        Configured(
            "at stage 3: whether a unit is gathered again for backward",
            Choice(options=("auto", "always", "never")),
            default="auto",
        ),
    ] = True
    """At stage 3, whether parameters are freed after each use, or once per step."""
    prefetch: Annotated[
        int, Configured("units gathered ahead", Integer(minimum=0, maximum=10_000))
    ] = 1
    unit_blocks: Annotated[int, Configured("blocks gathered together", Integer(maximum=10_000))] = 1
    """At stage 3, blocks that are gathered together; both ends are units too."""
    keep_whole_below: Annotated[
        int, Configured("elements: smaller parameters are not cut", NUMBERS_OR_ZERO)
    ] = 0
    secondary: Annotated[
        bool,
        Configured(
            "at stage 3: slices of what was gathered stay in each node, where it is gathered again"
        ),
    ] = False
    gather: Annotated[
        GatherDType,
        Configured(
            "at stage 3: gather parameters, codes of weights multiplied in 8 bits, "
            "or rounded matrices"
        ),
    ] = "parameters"
    """At stage 3, what is gathered: parameters, codes of weights that are multiplied in 8 bits
    (`parallel/fp8_gather.py`), or matrices in int8 (`parallel/storage/buckets.py`)."""
    reduce: Annotated[
        ReduceKind,
        Configured(
            "how gradients are summed into slices: exactly, or rounded, in nodes "
            "and then across them"
        ),
    ] = "exact"
    optimizer_offload: Annotated[OffloadTarget, Configured("where optimizer state rests")] = "none"
    parameter_offload: Annotated[OffloadTarget, Configured("where slices of parameters rest")] = (
        "none"
    )
    offload_dir: Annotated[
        str, Configured("folder of the files of nvme", default="none", path=True)
    ] = ""
    offload_buffers: Annotated[
        int, Configured("with nvme: buckets in memory at once", AT_LEAST_TWO)
    ] = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Give the schedule and, for each stage, the blocks that it owns.

    `stages[s]` lists block indices (maybe none); stage 0 also owns the embedding, the last stage
    the final norm and the head. The schedule says on which rank a stage lives. `rows` are the
    actions of each where no builder makes them, but a file ("file") or a search ("auto").
    """

    schedule: Annotated[str, Configured("order of forward and backward passes")] = "1f1b"
    virtual_stages: Annotated[int, Configured("stages on each pipeline rank")] = 1
    stages: Annotated[
        tuple[tuple[int, ...], ...],
        Configured(
            "the blocks of each stage; auto: balanced by time, even: by number",
            StageLists(),
            default="auto",
        ),
    ] = ()
    rows: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Say which blocks, and which operators of the others, run forward again in backward.

    "full" recomputes every block whose index is divisible by `every`: it stores only its input, on
    the device or on the host (`offload`). Of the other blocks, all of them with "selective",
    `operators` are made again; with experts, those of attention.
    """

    policy: Annotated[
        RecomputePolicy, Configured("what is redone: nothing, operators of blocks, or blocks")
    ] = "none"
    every: Annotated[int, Configured("with full: every how many blocks")] = 1
    offload: Annotated[
        Literal["none", "host"], Configured("with full: where stored inputs wait for backward")
    ] = "none"
    operators: Annotated[
        tuple[RecomputedOperator, ...],
        Configured(
            "redone in blocks not redone whole; auto: norm and activation with selective",
            ChoiceList(options=("norm", "activation", "mlp", "attention")),
            default="auto",
            after="policy",
        ),
    ] = ()

    def recomputes(self, layer: int) -> bool:
        """Return whether block `layer` is recomputed in full."""
        return self.policy == "full" and layer % self.every == 0

    def redoes(self, operator: RecomputedOperator, layer: int) -> bool:
        """Return whether an operator of block `layer` runs twice, alone or with the whole block."""
        return self.recomputes(layer) or operator in self.operators

    def operators_of(self, layer: int) -> frozenset[RecomputedOperator]:
        """Return the operators of block `layer` that are made again, the rest being kept."""
        return frozenset() if self.recomputes(layer) else frozenset(self.operators)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Say how the ranks of `cp` let each query meet each key.

    `ulysses_degree` neighbours exchange heads for positions; keys and values go around, or are
    gathered over, a ring of `cp / ulysses_degree` places (`core/choices/context_kinds.py`).
    `attention` is the kernel of what is on a rank (`core/choices/kernels.py`).
    """

    kind: Annotated[
        ContextKind, Configured("how attention meets the other pieces of a sequence")
    ] = PLAIN_CONTEXT_KIND
    ulysses_degree: Annotated[
        int,
        Configured(
            "with ulysses-ring: ranks that exchange heads, neighbours; the ring has cp / this many",
            Integer(words=("auto",)),
            default="auto",
        ),
    ] = 1
    attention: Annotated[
        AttentionKernel,
        Configured("the kernel that computes attention; auto: the fastest that takes the run"),
    ] = "auto"

    @property
    def record(self) -> ContextKindRecord:
        """Return the facts of the kind."""
        return CONTEXT_KINDS[self.kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """Say how ranks sum and gather (`core/choices/collective_algorithms.py`)."""

    algorithm: Annotated[
        CollectiveAlgorithm,
        Configured(
            "how ranks sum and gather; auto: hierarchical over Gloo where that is faster, "
            "else backend",
            Choice(options=("auto", *COLLECTIVE_ALGORITHMS)),
            default="auto",
        ),
    ] = BACKEND


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Hold everything that can change only speed and memory."""

    mesh: Mesh
    """Into how many ranks each axis splits."""
    microbatch_sequences: Annotated[
        int, Configured("sequences of one forward pass of one rank", default=1, table="batch")
    ]
    pipeline: Pipeline
    """The schedule, and the blocks of each stage."""
    sequence_parallel: Annotated[bool, Configured("split norms and residuals over tp too")] = False
    tp_overlap: Annotated[
        TensorOverlapKind,
        Configured(
            "how products over tp run beside the messages of their own rows, chunk by chunk",
            Choice(options=("none", "ring", "symmetric-memory", "auto")),
        ),
    ] = "none"
    """How products run beside the messages of their own rows, where the stream is split: not, in
    chunks around a ring of tensor ranks, or by fused operators on GPUs."""
    zero: Zero = field(default_factory=Zero)
    """What data-parallel ranks share out."""
    recompute: Recompute = field(default_factory=Recompute)
    """What runs forward again in backward."""
    context: Context = field(default_factory=Context)
    """How queries meet the keys of other context ranks."""
    experts: ExpertLayout = field(default_factory=ExpertLayout)
    """How experts are held, and how tokens travel to them."""
    kernels: Kernels = field(default_factory=Kernels)
    """What of a block runs as one kernel, and by which library."""
    collectives: Collectives = field(default_factory=Collectives)
    """How gradients are summed over data-parallel ranks."""

    @property
    def tp_ring(self) -> bool:
        """Return whether rows go around the tensor ranks in chunks, each beside its product."""
        return self.tp_overlap == "ring" and self.sequence_parallel and self.mesh.tp > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The split of one training run: complete, resolved, and legal."""

    name: str
    mathematics: Mathematics
    layout: Layout
    cluster: Cluster
    schema: int = PLAN_SCHEMA

    @property
    def model(self) -> ModelShape:
        """Return the shape of the model."""
        return self.mathematics.model

    @property
    def mesh(self) -> Mesh:
        """Return the mesh of ranks."""
        return self.layout.mesh

    @property
    def num_microbatches(self) -> int:
        """Return the microbatches per step of one data-parallel rank."""
        return self.mathematics.global_sequences // (
            self.layout.microbatch_sequences * self.mesh.dp
        )

    @property
    def placement(self) -> Placement:
        """Return which positions of a sequence each context rank holds."""
        ulysses = self.layout.context.ulysses_degree
        return Placement(
            kind=self.layout.context.record.placement,
            ring_degree=self.mesh.cp // ulysses,
            ulysses_degree=ulysses,
            length=self.mathematics.sequence_length,
        )

    @property
    def local_tokens(self) -> int:
        """Return the token positions of a microbatch on one context rank."""
        length = self.mathematics.sequence_length // self.mesh.cp
        return self.layout.microbatch_sequences * length

    @property
    def num_stages(self) -> int:
        """Return the number of pipeline stages, virtual ones included."""
        return len(self.layout.pipeline.stages)

    @property
    def tokens_per_step(self) -> int:
        """Return the token positions of a global batch, ignored ones included."""
        return self.mathematics.global_sequences * self.mathematics.sequence_length

    def _repr_html_(self) -> str | None:
        """Return the plan, as a notebook shows it: its page without a script."""
        return NOTEBOOK_VIEWS.html("plan", self)

    def same_mathematics(self, other: Plan) -> bool:
        """Return whether both plans must give the same numbers."""
        return self.mathematics == other.mathematics

    def content_hash(self) -> str:
        """Return 16 hex digits that name the content of this plan."""
        return content_hash(self)

    def to_json(self) -> str:
        """Return the plan as readable JSON."""
        return json.dumps(to_json(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Return the plan that `to_json` wrote; ValueError where it is not one."""
        load_installed_plugins()
        data: Any = decode_json(text)
        entries = cast("dict[str, object]", data) if isinstance(data, dict) else {}
        schema = entries.get("schema")
        if schema != PLAN_SCHEMA:
            raise ValueError(f"plan schema {schema!r}; this version reads schema {PLAN_SCHEMA}")
        return from_json(cls, without_removed(entries), where="plan")

    @classmethod
    def read(cls, path: Path) -> Plan:
        """Return the plan in the file at `path`."""
        return cls.from_json(path.read_text(encoding="utf-8"))
