"""Between which numbers the memory of a row can be: all that it can mean, and what is estimated.

A row that does not say whether blocks run again, whether attention keeps its scores, which loss or
which dtypes a recipe has, can mean any: the band covers every choice that fits its device, while
the number stays that of the fastest. What is not counted (activations, buffers) is off by `HELD`
beside (four of five runs), and what is counted by padding and by what few rows say of states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from bench.accuracy.predict import BELIEVED, GB, Case, Prediction, stacked
from echelon.cost.inputs.cost_inputs import CostInputs, TrainerConstants
from echelon.cost.inputs.numbers import Array, LayoutNumbers, Num
from echelon.cost.peak.fullest_rank import fullest_rank_bytes
from echelon.planner.predict.residuals import HELD

COUNTED = ("parameters", "optimizer")
"""Terms that follow from weights and dtypes alone."""
PADDED = (0.95, 1.05)
"""How far off what is counted can be."""
LOSSES: Mapping[str, tuple[float, float]] = {
    "megatron-core": (2.0, 10.0),
    "fsdp": (4.0, 14.0),
    "generic": (4.0, 14.0),
    "deepspeed": (4.0, 14.0),
}
"""The least and the most that a loss holds of each logit, by generations: fused or compiled, and as
it is written."""
RECIPES = ((2.0, 8.0), (4.0, 12.0))
"""Bytes of gradients and of states of a weight in NVIDIA's recipes: both moments in bf16 with
gradients in bf16, or all in fp32."""
MOST_VARIANTS = 48
"""Splits of a row of which a band is made; of more it takes some, evenly."""


def with_memory_bands(predictions: Sequence[Prediction]) -> list[Prediction]:
    """Return the predictions, each that has memory with its band."""
    told = [one for one in predictions if one.case is not None and one.memory_gb is not None]
    if not told:
        return list(predictions)
    variants = [list(_variants(one.case)) for one in told if one.case is not None]
    flat = [
        (one.case, layout, software)
        for one, some in zip(told, variants, strict=True)
        for layout, software in some
        if one.case is not None
    ]
    work = CostInputs(
        model=stacked([case.model for case, _, _ in flat]),
        machine=stacked([case.machine for case, _, _ in flat]),
        software=stacked([software for _, _, software in flat]),
        layout=stacked([layout for _, layout, _ in flat]),
    )
    with np.errstate(all="ignore"):
        terms = fullest_rank_bytes(work).terms
    bands: dict[int, tuple[float, float]] = {}
    start = 0
    for one, some in zip(told, variants, strict=True):
        part = slice(start, start + len(some))
        start = part.stop
        bands[id(one)] = _band(one, {name: np.asarray(v)[part] for name, v in terms.items()})
    return [replace(one, memory_band_gb=bands.get(id(one))) for one in predictions]


def _band(one: Prediction, terms: Mapping[str, Array]) -> tuple[float, float]:
    assert one.case is not None
    assert one.memory_gb is not None
    total = np.asarray(sum(terms.values()))
    capacity = BELIEVED * float(np.asarray(one.case.machine.memory_bytes))
    fits = np.isfinite(total) & (total <= capacity)
    fits = fits if fits.any() else np.isfinite(total)
    counted = np.asarray(sum(terms[name] for name in COUNTED))
    left_out: Num = 0.0
    if one.case.measured.memory_kind != "driver":
        left_out = terms["context"]
    if one.case.measured.memory_kind == "allocated":
        left_out = left_out + terms["slack"]
    rest = total - counted - left_out
    low, high = (sure * counted + factor * rest for sure, factor in zip(PADDED, HELD, strict=True))
    return (
        min(one.memory_gb, float(low[fits].min()) / GB),
        max(one.memory_gb, float(high[fits].max()) / GB),
    )


def _variants(case: Case) -> Iterator[tuple[LayoutNumbers, TrainerConstants]]:
    """Yield all that a row can mean: its splits, blocks that run again, attention that is fused."""
    layouts = [one.layout for one in case.candidates]
    layouts = layouts[:: -(-len(layouts) // MOST_VARIANTS)]
    if not case.row.word("recompute"):
        first = layouts[0]
        layouts += [
            replace(first, recompute=share, per_op=0.0, selective=0.0) for share in (0.0, 1.0)
        ]
    for layout in layouts:
        for software in _trainers(case):
            yield layout, software


def _trainers(case: Case) -> list[TrainerConstants]:
    """Return what a trainer can do of what a row does not name: attention, loss, dtypes."""
    row, own, generation = case.row, case.software, case.program.generation
    found = [own]
    if row.flag("flash_attn") is None:
        found = [replace(own, fused_attention=kind) for kind in (0.0, 1.0)]
    ends = next((ends for key, ends in LOSSES.items() if generation.startswith(key)), None)
    if ends and not row.word("loss"):
        found += [replace(one, logit_held=held) for one in found for held in ends]
    if case.program.is_core and not (row.word("gradient_dtype") or row.word("state_dtype")):
        found += [
            replace(one, gradient_bytes=gradient, state_bytes=states)
            for one in found
            for gradient, states in RECIPES
        ]
    return found
