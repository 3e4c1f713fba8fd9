"""The controls of the explorer as the numbers that formulas read, and what these come to.

All of this module runs in the page, too: it is compiled (`page/compiled/`). A record of a table is
a mapping there, as it comes of JSON. Nothing here is new: `cost_inputs_from_plan` gives the same
numbers of the plan that the controls make (tests/page/explorer/test_rules.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from echelon.core.model_shape import Experts, LatentAttention, ModelShape
from echelon.cost.seconds.flops import flops_of_weights
from echelon.cost.seconds.from_plan import model_numbers_from_shape
from echelon.cost.seconds.inputs import CostInputs, TrainerConstants
from echelon.cost.seconds.numbers import LayoutNumbers, MachineNumbers, Num, TierNumbers
from echelon.cost.seconds.step import step_seconds
from echelon.planner.predict.estimate import closed_form_bytes

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
    zero: int
    """ZeRO stage."""
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
    recompute: str
    """What runs forward again."""
    context: str
    """How context ranks meet."""
    sequence_parallel: bool
    """Whether tensor ranks share the residual stream."""

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Hold what a step takes and what its fullest rank holds, by term."""

    seconds: Mapping[str, Num]
    bytes: Mapping[str, Num]
    ranks: int
    tokens: float
    model_flops: float
    peak_flops: float

    @property
    def step_s(self) -> Num:
        """Return the seconds of a step."""
        return sum(self.seconds.values(), 0.0)

    @property
    def bytes_held(self) -> Num:
        """Return the bytes that the fullest rank holds at its peak."""
        return sum(self.bytes.values(), 0.0)

    @property
    def tokens_per_s_per_device(self) -> Num:
        """Return the tokens of a device in a second."""
        return self.tokens / self.step_s / self.ranks

    @property
    def mfu(self) -> Num:
        """Return the share of the devices' peak that the model's own FLOPs are."""
        return self.model_flops / (self.step_s * self.ranks * self.peak_flops)


def predict(tables: Record, controls: Controls, model: Record, cluster: Record) -> Prediction:
    """Return what a step of the controls takes: the closed forms of a search."""
    work = inputs_of_controls(tables, controls, model, cluster)
    shape = model_shape(model["shape"])
    tokens = controls.sequences * controls.length
    return Prediction(
        seconds=step_seconds(work).terms,
        bytes=closed_form_bytes(work).terms,
        ranks=controls.ranks,
        tokens=tokens,
        model_flops=flops_of_weights(model["multiplied"], shape, controls.length) * tokens,
        peak_flops=cluster["peak_flops"],
    )


def inputs_of_controls(
    tables: Record, controls: Controls, model: Record, cluster: Record
) -> CostInputs:
    """Return what the formulas read of the controls."""
    shape = model_shape(model["shape"])
    machine = tables["machines"][machine_place(controls, model, cluster)]
    rates = {**machine, "tiers": tuple(TierNumbers(**one) for one in machine["tiers"])}
    software = tables["software"][cluster["software"][model["name"]]]
    return CostInputs(
        model=model_numbers_from_shape(shape, controls.length, tp=float(controls.tp)),
        machine=MachineNumbers(**rates),
        software=TrainerConstants(**software),
        layout=layout_of_controls(tables, controls, shape, cluster),
    )


def machine_place(controls: Controls, model: Record, cluster: Record) -> int:
    """Return where in their table the rates of a device are, with so many ranks at work.

    Each row says from how many ranks on it holds, and whether a window hides a part of a sequence.
    """
    window = model["shape"]["window"]
    hidden = window is not None and window < controls.length
    found = -1
    for row in cluster["machines"][model["name"]]:
        if row["ranks"] <= controls.ranks and row["hidden"] == hidden:
            found = row["place"]
    return found


def model_shape(record: Record) -> ModelShape:
    """Return a model of its record."""
    experts, latent = record["experts"], record["latent"]
    parts = {
        "experts": None if experts is None else Experts(**experts),
        "latent": None if latent is None else LatentAttention(**latent),
    }
    return ModelShape(**{**record, **parts})


def layout_of_controls(
    tables: Record, controls: Controls, shape: ModelShape, cluster: Record
) -> LayoutNumbers:
    """Return the numbers of the split that the controls say."""
    kind = tables["context_kinds"][controls.context]
    replicas = controls.dp_replicate * controls.dp_shard
    redone = 1.0 if controls.recompute == "selective" else 0.0
    return LayoutNumbers(
        tp=float(controls.tp),
        cp=float(controls.cp),
        pp=float(controls.pp),
        dp_shard=float(controls.dp_shard),
        dp_replicate=float(controls.dp_replicate),
        ep=float(controls.ep),
        sequence_parallel=float(controls.sequence_parallel),
        ulysses=float(controls.cp) if kind["exchanges_heads"] else 1.0,
        gathered=float(kind["gathers_keys"]),
        microbatch=float(controls.microbatch),
        microbatches=float(controls.sequences // (controls.microbatch * replicas)),
        virtual=float(controls.virtual),
        schedule=float(tables["schedules"][controls.schedule]),
        zero=float(controls.zero),
        recompute=1.0 if controls.recompute == "full" else 0.0,
        redone_norm=redone,
        redone_activation=redone if shape.has_dense_blocks else 0.0,
        one_memory=float(not cluster["gpus"]),
    )


def controls_of_record(record: Record) -> Controls:
    """Return controls of their record."""
    return Controls(**record)
