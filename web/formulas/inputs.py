# SPDX-License-Identifier: Apache-2.0
"""The controls of the explorer as the numbers that formulas read, and what these come to.

All of this module runs in the page. A record of a table is a mapping there, as it comes of JSON.
Nothing here is new: `cost_inputs_from_plan` gives the same numbers of the plan that the controls
make (tests/web/test_inputs.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from echelon.core.model_shape import (
    Experts,
    LatentAttention,
    ModelShape,
    Multipliers,
    RopeScaling,
    Rotary,
)
from echelon.cost.inputs.cost_inputs import CostInputs, TrainerConstants
from echelon.cost.inputs.numbers import LayoutNumbers, MachineNumbers, Num, TierNumbers, ceil_div
from echelon.cost.seconds.from_plan import (
    constants_for_precision,
    gathered_weight_bytes,
    model_numbers_from_shape,
    summed_weight_bytes,
)
from echelon.cost.seconds.kernels import flops_of_weights
from echelon.cost.seconds.step import step_seconds
from echelon.page.explorer.controls import INT8_BLOCK, OPERATORS, PRECISIONS, Controls, Record
from echelon.planner.predict.estimate import closed_form_bytes


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
        peak_flops=cluster["peak_flops"][controls.precision],
    )


def inputs_of_controls(
    tables: Record, controls: Controls, model: Record, cluster: Record
) -> CostInputs:
    """Return what the formulas read of the controls."""
    shape = model_shape(model["shape"])
    software = TrainerConstants(**tables["software"][cluster["software"][model["name"]]])
    return CostInputs(
        model=model_numbers_from_shape(shape, controls.length, tp=float(controls.tp)),
        machine=machine_numbers(tables, controls, model, cluster),
        software=constants_for_precision(
            software, PRECISIONS[controls.precision], controls.optimizer
        ),
        layout=layout_of_controls(tables, controls, shape, cluster),
    )


def machine_numbers(
    tables: Record, controls: Controls, model: Record, cluster: Record
) -> MachineNumbers:
    """Return the rates of a device with the controls' ranks at work."""
    machine = tables["machines"][machine_place(tables, controls, model, cluster)]
    rates = {**machine, "tiers": tuple(TierNumbers(**one) for one in machine["tiers"])}
    return MachineNumbers(**rates)


def machine_place(tables: Record, controls: Controls, model: Record, cluster: Record) -> int:
    """Return where in their table the rates of a device are, with so many ranks at work.

    Each row says from how many ranks on it holds, and whether a window hides a part of a sequence.
    """
    window = model["shape"]["window"]
    hidden = window is not None and window < controls.length
    place = cluster["machines"][controls.precision][model["name"]]
    found = -1
    for row in tables["machine_rows"][place]:
        if row["ranks"] <= controls.workers and row["hidden"] == hidden:
            found = row["place"]
    return found


def model_shape(record: Record) -> ModelShape:
    """Return a model of its record."""
    experts, latent, scaling = record["experts"], record["latent"], record["rope_scaling"]
    parts = {
        "experts": None if experts is None else Experts(**experts),
        "latent": None if latent is None else LatentAttention(**latent),
        "rope_scaling": None if scaling is None else RopeScaling(**scaling),
        "rotary": Rotary(**record["rotary"]),
        "multipliers": Multipliers(**record["multipliers"]),
    }
    return ModelShape(**{**record, **parts})


def layout_of_controls(
    tables: Record, controls: Controls, shape: ModelShape, cluster: Record
) -> LayoutNumbers:
    """Return the numbers of the split that the controls say."""
    kind = tables["context_kinds"][controls.context]
    replicas = controls.dp_replicate * controls.dp_shard
    layers, precision = shape.layers, PRECISIONS[controls.precision]
    again = ceil_div(layers, controls.every) if controls.recompute == "full" else 0
    redone = redone_operators(controls, shape)
    coded, block = controls.gather != "parameters", INT8_BLOCK if controls.gather == "int8" else 0
    return LayoutNumbers(
        tp=float(controls.tp),
        cp=float(controls.cp),
        pp=float(controls.pp),
        dp_shard=float(controls.dp_shard),
        dp_replicate=float(controls.dp_replicate),
        ep=float(controls.ep),
        expert_tp=float(controls.expert_tp),
        two_hop=float(controls.dispatch == "two-hop"),
        chunks=float(controls.chunks),
        sequence_parallel=float(controls.sequence_parallel),
        tp_overlap=float(controls.tp_overlap != "none"),
        ulysses=float(exchanging_ranks(kind, controls)),
        gathered=float(kind["gathers_keys"]),
        microbatch=float(controls.microbatch),
        microbatches=float(controls.sequences // (controls.microbatch * replicas)),
        virtual=float(controls.virtual),
        schedule=float(tables["schedules"][controls.schedule]),
        zero=float(controls.zero),
        reshard=float(controls.reshard == "always"),
        recompute=again / layers,
        selective=float("attention" in redone),
        redone_norm=float("norm" in redone),
        redone_activation=float("activation" in redone),
        redone_mlp=float("mlp" in redone),
        offload=float(controls.optimizer_offload != "none"),
        parameter_offload=float(controls.parameter_offload != "none"),
        gathered_bytes=gathered_weight_bytes(precision, int8_block=block) if coded else 0.0,
        gathers_ends=float(controls.gather == "int8"),
        secondary=float(controls.secondary),
        summed_bytes=summed_weight_bytes(controls.reduce, precision),
        servers=float(controls.servers),
    )


def exchanging_ranks(kind: Record, controls: Controls) -> int:
    """Return among how many context ranks a kind exchanges heads."""
    if controls.cp == 1 or kind["exchange"] == "none":
        return 1
    return controls.cp if kind["exchange"] == "all" else controls.ulysses


def redone_operators(controls: Controls, shape: ModelShape) -> tuple[str, ...]:
    """Return what runs again of blocks that do not run again whole."""
    if controls.operators != "auto":
        return OPERATORS[controls.operators]
    if controls.recompute != "selective":
        return ()
    return ("norm", "activation") if shape.has_dense_blocks else ("norm",)
