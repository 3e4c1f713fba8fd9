"""The Plan: one frozen value that is planned, proven, trained and compared with reality.

What can change the mathematics (`Mathematics`) and what can only change speed and memory
(`Layout`) are two nested records, so "the same mathematics, another layout" is one comparison.
Nothing in a Plan is "auto": `config/` resolves every choice before it builds one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from echelon.core.cluster import Cluster
from echelon.core.experts import Balance, ExpertLayout
from echelon.core.mesh import Mesh
from echelon.core.model_shape import ModelShape
from echelon.core.placement import Placement
from echelon.core.serialize import content_hash, from_json, to_json

DType = Literal["fp64", "fp32", "bf16", "fp16"]
DTYPE_BYTES: dict[str, int] = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}

OptimizerKind = Literal["adamw", "sgd", "muon"]
DecayRule = Literal["matrices", "blocks", "all"]
LearningRateSchedule = Literal["constant", "linear", "cosine", "wsd"]
LossScaling = Literal["none", "dynamic", "fixed"]
ZeroStage = Literal[0, 1, 2, 3]
Accumulation = Literal["whole", "slices"]
Home = Literal["none", "host", "nvme"]
RecomputePolicy = Literal["none", "selective", "full"]
ContextKind = Literal["ring", "striped", "gathered", "ulysses", "ulysses-ring"]
Documents = Literal["joined", "separate"]

PLAN_SCHEMA = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Give the dtype of parameters, gradients, their reduction, and the master copy.

    Forward and backward compute in `parameters`; gradients accumulate in `gradients` and are summed
    over ranks in `reduction`; the optimizer updates a copy in `master` where that is another dtype.
    The loss is multiplied by `loss_scale` before backward ("fixed"), or by a scale that starts
    there ("dynamic"): it halves when a gradient overflows `loss_scale_hysteresis` times, never
    below `loss_scale_min`, and doubles after `loss_scale_window` steps without overflow.
    """

    parameters: DType = "fp32"
    gradients: DType = "fp32"
    reduction: DType = "fp32"
    master: DType = "fp32"
    loss_scaling: LossScaling = "none"
    loss_scale: float = 65536.0
    loss_scale_window: int = 1000
    loss_scale_min: float = 1.0
    loss_scale_hysteresis: int = 1

    @property
    def has_master(self) -> bool:
        """Return whether the optimizer updates a copy, not the parameters themselves."""
        return self.master != self.parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """Give the optimizer and its learning rate over the steps.

    "adamw" uses `beta1`, `beta2`, `eps`; "sgd" uses `momentum`; "muon" (matrices of blocks) uses
    `momentum` and `newton_schulz_steps`, and AdamW for all other parameters. `decay` says what
    takes weight decay: "matrices", those of "blocks" only (no embedding, no head), or "all".
    `clip_norm` of None leaves gradients as they are. The learning rate rises linearly over
    `warmup_steps`, then follows `schedule` down to `final_ratio` x `learning_rate` at
    `total_steps`; "wsd" stays flat and falls linearly over the last `decay_steps`.
    """

    kind: OptimizerKind = "adamw"
    learning_rate: float = 3e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.95
    newton_schulz_steps: int = 5
    weight_decay: float = 0.1
    decay: DecayRule = "matrices"
    clip_norm: float | None = 1.0
    schedule: LearningRateSchedule = "cosine"
    warmup_steps: int = 0
    decay_steps: int = 0
    total_steps: int = 1
    final_ratio: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Mathematics:
    """Hold everything that can change the numbers of a run.

    `documents` says whether attention crosses from one document of a sequence to another
    ("joined") or stays inside each ("separate").
    """

    model: ModelShape
    global_sequences: int
    sequence_length: int
    documents: Documents = "joined"
    seed: int = 0
    precision: Precision = field(default_factory=Precision)
    optimizer: Optimizer = field(default_factory=Optimizer)
    balance: Balance = field(default_factory=Balance)


@dataclass(frozen=True, slots=True, kw_only=True)
class Zero:
    """Say what of parameters, gradients and optimizer state data-parallel ranks share out.

    What is shared out is cut into slices over `dp_shard` (x `cp`): nothing at stage 0, optimizer
    state at 1, gradients too at 2, parameters too at 3 (Rajbhandari et al., "ZeRO", 2020).

    `accumulate` says how the gradients of several microbatches add up: in a "whole" buffer that is
    reduced once per step, or in "slices", reduced after every microbatch. At stage 3 parameters are
    gathered by unit (`unit_blocks` blocks; the embedding; the head), those of the next `prefetch`
    blocks ahead of their use, and freed after each use (`reshard_after_forward`) or once per step;
    parameters of fewer than `keep_whole_below` elements are never cut. `optimizer_offload` and
    `parameter_offload` say where slices rest between uses, "nvme" meaning files in `offload_dir`,
    of which at most `offload_buffers` buckets are in memory at once.
    """

    stage: ZeroStage = 0
    bucket_bytes: int = 25 * 2**20
    accumulate: Accumulation = "whole"
    reshard_after_forward: bool = True
    prefetch: int = 1
    unit_blocks: int = 1
    keep_whole_below: int = 0
    optimizer_offload: Home = "none"
    parameter_offload: Home = "none"
    offload_dir: str = ""
    offload_buffers: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Give the schedule and, for each stage, the blocks that it owns.

    `stages[s]` lists block indices (maybe none); stage 0 also owns the embedding, the last stage
    the final norm and the head. Which rank a stage lives on, the schedule says
    (`schedule.of_plan`). `rows` are the actions of each pipeline rank where no builder makes them:
    those of a file ("file"), or those that a search found ("auto").
    """

    schedule: str = "1f1b"
    virtual_stages: int = 1
    stages: tuple[tuple[int, ...], ...] = ()
    rows: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Say which blocks store only their input and run forward again in backward.

    "full" recomputes every block whose index is divisible by `every`. `offload` says where the
    stored inputs wait for backward: on the device, or in the memory of the host.
    """

    policy: RecomputePolicy = "none"
    every: int = 1
    offload: Literal["none", "host"] = "none"

    def recomputes(self, layer: int) -> bool:
        """Return whether block `layer` is recomputed in full."""
        return self.policy == "full" and layer % self.every == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Say how the ranks of `cp` let each query meet each key.

    "ring" (zigzag placement) and "striped" send keys and values around a ring of
    `cp / ulysses_degree` ranks, "gathered" gathers them, "ulysses" exchanges heads for positions
    among `ulysses_degree` ranks, "ulysses-ring" does that inside of a ring.
    """

    kind: ContextKind = "ring"
    ulysses_degree: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Hold everything that can change only speed and memory."""

    mesh: Mesh
    microbatch_sequences: int
    pipeline: Pipeline
    sequence_parallel: bool = False
    zero: Zero = field(default_factory=Zero)
    recompute: Recompute = field(default_factory=Recompute)
    context: Context = field(default_factory=Context)
    experts: ExpertLayout = field(default_factory=ExpertLayout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Say how one training run is split; complete, resolved, and legal."""

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
        kind, ulysses = self.layout.context.kind, self.layout.context.ulysses_degree
        return Placement(
            kind="striped" if kind == "striped" else "zigzag",
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
        data: Any = json.loads(text)
        entries = cast("dict[str, object]", data) if isinstance(data, dict) else {}
        schema = entries.get("schema")
        if schema != PLAN_SCHEMA:
            raise ValueError(f"plan schema {schema!r}; this version reads schema {PLAN_SCHEMA}")
        return from_json(cls, data, where="plan")

    @classmethod
    def read(cls, path: Path) -> Plan:
        """Return the plan in the file at `path`."""
        return cls.from_json(path.read_text(encoding="utf-8"))
