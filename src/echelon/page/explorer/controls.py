# SPDX-License-Identifier: Apache-2.0
"""Controls of the explorer, their words that stand for several settings, and their run file.

Compiled for the page, as all that reads it. Each control is one setting of a run file, but
`precision` and `operators`, whose words are names of settings that go together (`PRECISIONS`,
`OPERATORS`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from echelon.core.choices.context_kinds import kinds_with_degree
from echelon.core.plan import Precision, RecomputePolicy, ReduceKind
from echelon.core.settings.value_types import toml_text

Record = Mapping[str, Any]
"""A record of a table, by its members."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Controls:
    """Hold what the controls of the page say of a run, beside model and cluster."""

    pp: int
    """Pipeline ranks."""
    dp_replicate: int
    """Copies of what ZeRO cuts."""
    dp_shard: int
    """Data ranks over which ZeRO cuts."""
    cp: int
    """Context ranks."""
    tp: int
    """Tensor ranks."""
    ep: int
    """Expert ranks."""
    servers: int
    """Parameter servers beside the mesh."""
    sequence_parallel: bool
    """Whether tensor ranks share the residual stream."""
    tp_overlap: str
    """How products run beside the messages of their rows."""
    zero: int
    """ZeRO stage."""
    reshard: str
    """At stage 3, whether parameters are freed after each use ("always", "never")."""
    secondary: bool
    """At stage 3, whether a unit is gathered again inside of nodes alone."""
    gather: str
    """At stage 3, what is gathered: "parameters", or codes of them."""
    reduce: ReduceKind
    """How gradients are summed into slices: "exact", or rounded."""
    optimizer_offload: str
    """Where slices of optimizer state rest ("none", "host")."""
    parameter_offload: str
    """Where slices of parameters rest ("none", "host")."""
    schedule: str
    """Name of the schedule."""
    virtual: int
    """Stages on each pipeline rank."""
    microbatch: int
    """Sequences of a microbatch."""
    sequences: int
    """Sequences of a step."""
    length: int
    """Tokens of a sequence."""
    precision: str
    """A name in `PRECISIONS`."""
    optimizer: str
    """Name of the optimizer."""
    recompute: RecomputePolicy
    """What runs forward again."""
    every: int
    """With full recompute, every how many blocks one does."""
    operators: str
    """A name in `OPERATORS`: what of the other blocks runs again."""
    context: str
    """How context ranks meet."""
    ulysses: int
    """Ranks that exchange heads, where the kind leaves that open."""
    expert_tp: int
    """Pieces that an expert is cut into."""
    dispatch: str
    """How rows travel to their experts ("flat", "two-hop")."""
    chunks: int
    """Parts in which they travel."""

    @property
    def workers(self) -> int:
        """Return the number of ranks of the mesh."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def ranks(self) -> int:
        """Return the number of ranks, servers included."""
        return self.workers + self.servers


PLAIN: Mapping[str, int | str | bool] = MappingProxyType(
    {
        "ep": 1,
        "servers": 0,
        "sequence_parallel": False,
        "tp_overlap": "none",
        "reshard": "always",
        "secondary": False,
        "gather": "parameters",
        "reduce": "exact",
        "optimizer_offload": "none",
        "parameter_offload": "none",
        "virtual": 1,
        "optimizer": "adamw",
        "every": 1,
        "operators": "auto",
        "context": "ring",
        "ulysses": 1,
        "expert_tp": 1,
        "dispatch": "flat",
        "chunks": 1,
    }
)
"""What controls say where nobody says anything."""

INT8_BLOCK = 128
"""Numbers of a row that share a scale where `gather` is "int8": `zero.int8_block` by itself."""

PRECISIONS: Mapping[str, Precision] = MappingProxyType(
    {
        "fp32": Precision(),
        "bf16": Precision(parameters="bf16"),
        "bf16 gradients": Precision(parameters="bf16", gradients="bf16", reduction="bf16"),
        "fp16": Precision(parameters="fp16", loss_scaling="dynamic"),
        "fp8": Precision(parameters="bf16", matmul="fp8"),
        "fp8 tensor": Precision(
            parameters="bf16", matmul="fp8", fp8_scales="tensor", fp8_gradients="e5m2"
        ),
    }
)
"""Dtypes that go together. In fp8 linear layers of blocks multiply 8-bit numbers: tiles of 128 of
them share a scale, or whole tensors."""

_PRECISION_KEYS = (
    *("parameters", "gradients", "reduction", "loss_scaling", "matmul", "fp8_scales"),
)


def _precision_settings(precision: Precision) -> Mapping[str, str]:
    """Return the settings of a precision; without `parameters` the device would choose it."""
    plain = asdict(Precision())
    return {
        key: value
        for key, value in asdict(precision).items()
        if key == "parameters" or (key in _PRECISION_KEYS and value != plain[key])
    }


PRECISION_SETTINGS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {name: _precision_settings(precision) for name, precision in PRECISIONS.items()}
)
"""The settings of a run file below `[precision]`."""

OPERATORS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "auto": (),
        "norm": ("norm",),
        "attention": ("attention",),
        "mlp": ("mlp",),
        "norm activation": ("norm", "activation"),
        "norm attention": ("norm", "attention"),
        "norm mlp": ("norm", "mlp"),
        "norm mlp attention": ("norm", "mlp", "attention"),
    }
)
"""What runs again of blocks that do not run again whole; "auto" is what takes next to no time,
and only with selective recompute."""


def controls_of_record(record: Record) -> Controls:
    """Return controls of their record."""
    return Controls(**record)


WITH_DEGREE = tuple(kinds_with_degree())
"""Context kinds whose degree a run file without one leaves open."""

SETTINGS_OF_CONTROLS = (
    *(("mesh", name, name) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")),
    *(("mesh", name, name) for name in ("sequence_parallel", "tp_overlap")),
    ("servers", "count", "servers"),
    ("zero", "stage", "zero"),
    ("zero", "reshard_after_forward", "reshard"),
    *(("zero", name, name) for name in ("secondary", "gather", "reduce")),
    *(("zero", name, name) for name in ("optimizer_offload", "parameter_offload")),
    ("pipeline", "schedule", "schedule"),
    ("pipeline", "virtual_stages", "virtual"),
    ("batch", "global_sequences", "sequences"),
    ("batch", "microbatch_sequences", "microbatch"),
    ("batch", "sequence_length", "length"),
    ("precision", "", "precision"),
    ("optimizer", "kind", "optimizer"),
    ("recompute", "policy", "recompute"),
    ("recompute", "every", "every"),
    ("recompute", "operators", "operators"),
    ("context", "kind", "context"),
    ("context", "ulysses_degree", "ulysses"),
    *(("experts", name, name) for name in ("expert_tp", "dispatch", "chunks")),
)
"""Table and name of each setting, and its control; a precision is several settings."""
ALWAYS_WRITTEN = ("ep", "virtual")
"""Controls that a run file has even at their defaults."""


def settings_of_controls(
    controls: Controls, model: Record, cluster: Record
) -> Mapping[str, Mapping[str, Any]]:
    """Tables of the controls' run file, without settings at their defaults."""
    tables: dict[str, dict[str, Any]] = {
        "model": {"preset": model["name"]},
        "cluster": {"preset": cluster["name"]},
    }
    for table, name, control in SETTINGS_OF_CONTROLS:
        value = getattr(controls, control)
        if control == "precision":
            tables[table] = {key: word for key, word in PRECISION_SETTINGS[value].items()}
        elif _is_written(controls, control, value):
            listed = [*OPERATORS[value]] if control == "operators" else value
            tables.setdefault(table, {})[name] = listed
    return tables


def _is_written(controls: Controls, control: str, value: object) -> bool:
    """True if the run file has the setting of a control."""
    if control in ALWAYS_WRITTEN or control not in PLAIN or value != PLAIN[control]:
        return True
    if control == "reshard":
        return controls.zero == 3
    return control == "ulysses" and controls.context in WITH_DEGREE


def run_text(controls: Controls, model: Record, cluster: Record) -> str:
    """Return the run file of the controls, as TOML."""
    tables = settings_of_controls(controls, model, cluster)
    return "\n".join([_table_text(name, values) for name, values in tables.items()])


def _table_text(name: str, values: Mapping[str, Any]) -> str:
    lines = [f"{key} = {toml_text(value)}\n" for key, value in values.items()]
    return f"[{name}]\n{''.join(lines)}"
