# SPDX-License-Identifier: Apache-2.0
"""What a plan takes, as the search and the page of a run both print it: a step, memory, terms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

from echelon.core.units import GIB, binary_unit
from echelon.planner.predict.bands import (
    BandedValue,
    band_evidence,
    byte_term_bands,
    held_bytes_band,
    mfu_band,
    step_band,
    step_term_bands,
    tokens_per_s_band,
)
from echelon.planner.predict.estimate import Estimate
from echelon.planner.view.document import DataTable
from echelon.planner.view.text_layout import WIDTH, fill_text, table

SMALLEST_SHARE = 0.0005  # of the whole


def rate_lines(estimate: Estimate, *, label: int = 10, columns: int = WIDTH) -> Iterator[str]:
    """Yield the seconds of a step, the rate of a device, and its memory, with their bands.

    Each line begins with a name in `label` columns; the last ones say what the bands rest on.
    """
    step, held = step_band(estimate), held_bytes_band(estimate)
    tokens, mfu = tokens_per_s_band(estimate), mfu_band(estimate)
    yield f"{'step':<{label}}{step.value:.4g} s ({step.low:.4g} to {step.high:.4g})"
    rate = (
        f"{'rate':<{label}}{tokens.value:.0f} tokens/s of a device "
        f"({tokens.low:.0f} to {tokens.high:.0f}), "
        f"{mfu_text(estimate)}, {100 * mfu.low:.1f} to {100 * mfu.high:.1f}"
    )
    yield fill_text(rate, rest=" " * label, columns=columns)
    size, unit = held_unit(estimate)
    ends = f"{held.low / size:.1f} to {held.high / size:.1f}"
    memory = f"{'memory':<{label}}{held.value / size:.1f} {unit} ({ends})"
    if has_driver(estimate):
        allocated, reserved = estimate.allocated_bytes / size, estimate.reserved_bytes / size
        memory += f"; of it {allocated:.1f} allocated, {reserved:.1f} reserved"
    yield memory
    rests = band_evidence(estimate.inputs)
    told = f"four of five measured runs lie inside: {rests.similar_runs}"
    if rests.untested:
        told += f"; wider for what no run tells: {', '.join(rests.untested)}"
    if rests.differences:
        told += f". The nearest measured run is far: it was {', '.join(rests.differences)}"
    exact = "Bytes of parameters, gradients and optimizer are counted: they have no band"
    if estimate.by_lists:
        others = (
            ", the context and NCCL" if "nccl" in estimate.bytes else " and the device's context"
        )
        exact = f"All bytes are counted, but what an allocator{others} take"
    yield fill_text(f"{'bands':<{label}}{told}. {exact}.", rest=" " * label, columns=columns)


def mfu_text(estimate: Estimate) -> str:
    """Return the model FLOPs utilization, with the FLOPs that it counts, and the causal one."""
    text = f"MFU {100 * estimate.mfu:.1f} (full attention"
    if estimate.causal_flops != estimate.model_flops:
        text += f"; causal {100 * estimate.causal_mfu:.1f}"
    return f"{text})"


def held_unit(estimate: Estimate) -> tuple[int, str]:
    """Bytes and name of the unit for its memory: GiB, or MiB for less than one."""
    return binary_unit(min(held_bytes_band(estimate).value, GIB))


def has_driver(estimate: Estimate) -> bool:
    """Return whether a device's driver has memory of its own beside an allocator's."""
    return estimate.bytes["context"] > 0.0


def seconds_terms(estimate: Estimate, *, least: float = SMALLEST_SHARE) -> DataTable:
    """Return the terms of a step as a table; "-" is the band of what is counted.

    Terms of less than a share of `least` stand together.
    """
    terms = step_term_bands(estimate)
    shares = _shares(terms, step_band(estimate), (estimate.step_s, "step"), least)
    return DataTable.of(("term", "seconds", "band", "of the step"), shares)


def byte_terms(
    estimate: Estimate, memory_bytes: float, *, least: float = SMALLEST_SHARE
) -> DataTable:
    """Return the terms of what the fullest rank holds as a table, in `held_unit`."""
    size, unit = held_unit(estimate)
    terms = {name: _in_unit(amount, size) for name, amount in byte_term_bands(estimate).items()}
    held = _in_unit(held_bytes_band(estimate), size)
    shares = _shares(terms, held, (memory_bytes / size, "memory"), least)
    return DataTable.of(("term", unit, "band", "of the memory"), shares)


def terms_beside(estimate: Estimate, memory_bytes: float, *, columns: int = WIDTH) -> str:
    """Return the terms of a step and those of what the fullest rank holds, side by side."""
    left, right = (
        table(
            (*found.head[:2], found.head[3]), [(*row[:2], row[3]) for row in found.rows], columns
        ).splitlines()
        for found in (seconds_terms(estimate), byte_terms(estimate, memory_bytes))
    )
    width = max(map(len, left))
    pairs = zip_longest(left, right, fillvalue="")
    return "\n".join(f"{one:<{width}}    {two}".rstrip() for one, two in pairs)


def estimate_json(estimate: Estimate) -> dict[str, Any]:
    """Return what a plan takes as JSON values."""
    rests = band_evidence(estimate.inputs)
    return {
        "step_s": estimate.step_s,
        "step_band_s": band_json(step_band(estimate)),
        "seconds": dict(estimate.seconds),
        "seconds_bands": {name: band_json(one) for name, one in step_term_bands(estimate).items()},
        "held_bytes": estimate.bytes_held,
        "held_band_bytes": band_json(held_bytes_band(estimate)),
        "allocated_bytes": estimate.allocated_bytes,
        "reserved_bytes": estimate.reserved_bytes,
        "bytes": dict(estimate.bytes),
        "bytes_bands": {name: band_json(one) for name, one in byte_term_bands(estimate).items()},
        "bands_rest_on": {
            "like": rests.similar_runs,
            "beyond": list(rests.untested),
            "nearest_run_was": list(rests.differences),
        },
        "tokens_per_s_per_device": estimate.tokens_per_s_per_device,
        "tokens_band": band_json(tokens_per_s_band(estimate)),
        "mfu": estimate.mfu,
        "mfu_band": band_json(mfu_band(estimate)),
        "mfu_counts": "full attention",
        "causal_mfu": estimate.causal_mfu,
    }


def price_with_idle(price: float, devices: int, all_devices: int) -> float:
    """Price of a million tokens if all of `all_devices` are paid and `devices` are used."""
    return price * all_devices / devices


def price_text(price: BandedValue, devices: int, all_devices: int) -> str:
    """Price of a million tokens, with the price of idle devices if any."""
    text = f"{price.value:.4g} ({price.low:.4g} to {price.high:.4g}) for a million tokens"
    if idle := all_devices - devices:
        paid = price_with_idle(price.value, devices, all_devices)
        text += f"; {paid:.4g} with {idle:,} idle devices"
    return text


def band_json(amount: BandedValue) -> list[float]:
    """Return the ends of a band."""
    return [amount.low, amount.high]


def _in_unit(amount: BandedValue, size: int) -> BandedValue:
    return BandedValue(value=amount.value / size, low=amount.low / size, high=amount.high / size)


def _shares(
    terms: Mapping[str, BandedValue], total: BandedValue, whole: tuple[float, str], least: float
) -> list[tuple[str, ...]]:
    """Return rows of terms with bands and shares of a named whole, the largest first; the sum."""
    size, name = whole
    large = {key: one for key, one in terms.items() if one.value > least * size}
    shown = sorted(large.items(), key=lambda item: -item[1].value)
    small = [one for key, one in terms.items() if key not in large]
    rest = BandedValue(
        value=sum(one.value for one in small),
        low=sum(one.low for one in small),
        high=sum(one.high for one in small),
    )
    shown += [("all others", rest)] if rest.value > 1e-9 * size else []
    shown.append((f"sum ({name})", total))
    return [
        (key, f"{one.value:.4g}", band_text(one), f"{100 * one.value / size:.1f} %")
        for key, one in shown
    ]


def band_text(amount: BandedValue) -> str:
    """Return the ends of a band as tables have them; "-" for what is counted."""
    return "-" if amount.low == amount.high else f"{amount.low:.4g} to {amount.high:.4g}"
