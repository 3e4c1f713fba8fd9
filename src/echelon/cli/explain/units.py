# SPDX-License-Identifier: Apache-2.0
"""`echelon explain units`: rates of devices and links in all their units, and FLOPs of a run.

GB is 10^9 bytes and GiB 2^30; links are told one way and both ways, in bytes and in bits, because
each of these is called "bandwidth" somewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from echelon.cli.flags import bad_argument
from echelon.config.load import load_job
from echelon.core.parameters import num_parameters
from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.core.units import binary_bytes, decimal_bytes, duration, short_count
from echelon.cost.bytes.model_sizes import achieved_flops
from echelon.cost.bytes.terms import all_reduce_bytes
from echelon.cost.seconds.kernels import model_flops_per_token
from echelon.planner.view.text_layout import WIDTH, table, wrap_text

UTILIZATIONS = (0.3, 0.4, 0.5)  # of the peak
BITS = 8  # of a byte


def ask_units(run: str | None = None, settings: Sequence[str] = ()) -> Plan:
    """Return the plan that is told in units; ConfigError without a run, or where it is wrong."""
    if run is None:
        raise bad_argument(
            "units of which device, links and model? Name a run",
            "echelon explain units llama3-8b --set cluster.preset=16xh100",
        )
    return load_job(run, settings).plan


def units_json(plan: Plan) -> dict[str, Any]:
    """Return the page as JSON values."""
    device, each = plan.cluster.device, _flops_per_token(plan)
    return {
        "device": device.name,
        "memory_bytes": device.memory_bytes,
        "peak_flops": dict(device.peak_flops),
        "links": [
            {
                "name": link.name,
                "one_way_bytes_per_s": link.bandwidth,
                "one_way_bits_per_s": BITS * link.bandwidth,
                "both_ways_bytes_per_s": 2 * link.bandwidth,
                "gradients_s": _gradients_s(plan, link.bandwidth),
            }
            for link in plan.cluster.links
        ],
        "flops_per_token": each,
        "causal_flops_per_token": _flops_per_token(plan, causal=True),
        "flops_per_step": each * plan.tokens_per_step,
        "utilizations": [
            {"mfu": mfu, "flops": rate, "tokens_per_s": rate / each} for mfu, rate in _rates(plan)
        ],
    }


def units_text(plan: Plan, *, columns: int = WIDTH) -> str:
    """Return the page that a person reads."""
    parts = (_device(plan), _links(plan, columns=columns), _flops(plan, columns=columns))
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _flops_per_token(plan: Plan, *, causal: bool = False) -> float:
    return model_flops_per_token(plan.model, plan.mathematics.sequence_length, causal=causal)


def _rates(plan: Plan) -> Iterator[tuple[float, float]]:
    """Yield shares of the peak in the dtype of the parameters, if it is known, and their FLOP/s."""
    peak = plan.cluster.device.flops(plan.mathematics.precision.parameters)
    if peak is not None:
        for mfu in UTILIZATIONS:
            yield mfu, achieved_flops(plan.cluster.num_devices, peak, mfu)


def _gradients_s(plan: Plan, bandwidth: float) -> float:
    """Return the seconds of one all-reduce of all gradients over two ranks, at full bandwidth."""
    return all_reduce_bytes(_gradient_bytes(plan), 2) / bandwidth


def _gradient_bytes(plan: Plan) -> int:
    return num_parameters(plan.model) * DTYPE_BYTES[plan.mathematics.precision.reduction]


def _device(plan: Plan) -> Iterator[str]:
    device = plan.cluster.device
    yield f"{device.name}: dense peaks, of {plan.cluster.num_devices:,} devices"
    yield ""
    memory = f"{device.memory_bytes / 1e9:,.1f} GB = {binary_bytes(device.memory_bytes)}"
    yield f"  memory  {memory}, {device.memory_bandwidth / 1e9:,.0f} GB/s"
    for dtype, peak in device.peak_flops:
        whole = achieved_flops(plan.cluster.num_devices, peak, 1.0)
        yield f"  {dtype:<6}  {peak / 1e12:,.1f} TFLOP/s, together {whole / 1e15:,.2f} PFLOP/s"


def _links(plan: Plan, *, columns: int) -> Iterator[str]:
    yield "Links of a device; a collective sees one way"
    rows = [
        (
            f"  {link.name}",
            f"{link.bandwidth / 1e9:,.4g} GB/s",
            f"{BITS * link.bandwidth / 1e9:,.4g} Gb/s",
            f"{2 * link.bandwidth / 1e9:,.4g} GB/s",
            f"{_gradients_s(plan, link.bandwidth):.3g} s",
        )
        for link in plan.cluster.links
    ]
    yield table(("", "one way", "in bits", "both ways", "all gradients"), rows, columns=columns)
    whole = decimal_bytes(_gradient_bytes(plan))
    yield f"  all gradients: {whole}, added up over two ranks at that rate."


def _flops(plan: Plan, *, columns: int) -> Iterator[str]:
    each = _flops_per_token(plan)
    step = each * plan.tokens_per_step
    causal = _flops_per_token(plan, causal=True)
    yield f"{plan.model.name}: model FLOPs, forward and backward (cost/seconds/kernels.py)"
    yield ""
    yield f"  a token  {each:.4g} with full attention, which MFU counts; {causal:.4g} causal"
    yield (f"  a step   {plan.tokens_per_step:,} tokens x {each:.4g} = {step:.4g}")
    rows = [
        (
            f"  {100 * mfu:.0f} % MFU",
            f"{rate / 1e15:,.4g} PFLOP/s",
            f"{duration(step / rate)} a step",
            f"{short_count(rate / each)} tokens/s",
            f"{short_count(rate / each / plan.cluster.num_devices)} a device",
        )
        for mfu, rate in _rates(plan)
    ]
    if rows:
        yield table(("", "", "", "", ""), rows, columns=columns)
    else:
        yield from wrap_text(
            "The peak of this device is not known in this dtype.", "  ", "  ", columns=columns
        )
