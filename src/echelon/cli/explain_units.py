"""`echelon explain units`: rates of devices and links in all their units, and FLOPs of a run.

GB is 10^9 bytes and GiB 2^30; links are told one way and both ways, in bytes and in bits, because
each of these is called "bandwidth" somewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from echelon.cli.output import table
from echelon.cli.wrapped import wrapped
from echelon.config.load import load_job
from echelon.core.errors import ConfigError
from echelon.core.parameters import num_parameters
from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.core.rulebook.command_line import BAD_ARGUMENT
from echelon.core.units import binary_bytes, decimal_bytes, duration, short_count
from echelon.cost.collectives import all_reduce_bytes
from echelon.cost.flops import model_flops_per_token
from echelon.cost.model_sizes import achieved_flops

UTILIZATIONS = (0.3, 0.4, 0.5)
BITS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitsQuestion:
    """Hold the run whose model, cluster and batch are told in units."""

    plan: Plan

    @property
    def peak(self) -> float | None:
        """Return the peak of a device in the dtype of the parameters, if it is known."""
        return self.plan.cluster.device.flops(self.plan.mathematics.precision.parameters)

    @property
    def flops_per_token(self) -> float:
        """Return the model FLOPs of a token, forward and backward."""
        return model_flops_per_token(self.plan.model, self.plan.mathematics.sequence_length)


def ask_units(run: str | None, settings: Sequence[str]) -> UnitsQuestion:
    """Return the question; ConfigError without a run, or where it is wrong."""
    if run is None:
        raise ConfigError(
            BAD_ARGUMENT.problem(
                "units of which device, links and model? Name a run",
                set_by="the command line",
                works=("echelon explain units llama3-8b --set cluster.preset=16xh100",),
            )
        )
    return UnitsQuestion(plan=load_job(run, settings).plan)


def units_json(question: UnitsQuestion) -> dict[str, Any]:
    """Return the page as JSON values."""
    plan, device = question.plan, question.plan.cluster.device
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
        "flops_per_token": question.flops_per_token,
        "flops_per_step": question.flops_per_token * plan.tokens_per_step,
        "utilizations": [
            {"mfu": mfu, "flops": rate, "tokens_per_s": rate / question.flops_per_token}
            for mfu, rate in _rates(question)
        ],
    }


def units_text(question: UnitsQuestion) -> str:
    """Return the page that a person reads."""
    parts = (_device(question.plan), _links(question.plan), _flops(question))
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _rates(question: UnitsQuestion) -> Iterator[tuple[float, float]]:
    if question.peak is not None:
        for mfu in UTILIZATIONS:
            devices = question.plan.cluster.num_devices
            yield mfu, achieved_flops(devices, question.peak, mfu)


def _gradients_s(plan: Plan, bandwidth: float) -> float:
    """Return the seconds of one all-reduce of all gradients over two ranks, at full bandwidth."""
    size = DTYPE_BYTES[plan.mathematics.precision.reduction]
    return all_reduce_bytes(num_parameters(plan.model) * size, 2) / bandwidth


def _device(plan: Plan) -> Iterator[str]:
    device = plan.cluster.device
    yield f"{device.name}: dense peaks, of {plan.cluster.num_devices:,} devices"
    yield ""
    memory = f"{device.memory_bytes / 1e9:,.1f} GB = {binary_bytes(device.memory_bytes)}"
    yield f"  memory  {memory}, {device.memory_bandwidth / 1e9:,.0f} GB/s"
    for dtype, peak in device.peak_flops:
        whole = achieved_flops(plan.cluster.num_devices, peak, 1.0)
        yield f"  {dtype:<6}  {peak / 1e12:,.1f} TFLOP/s, together {whole / 1e15:,.2f} PFLOP/s"


def _links(plan: Plan) -> Iterator[str]:
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
    yield table(("", "one way", "in bits", "both ways", "all gradients"), rows)
    size = DTYPE_BYTES[plan.mathematics.precision.reduction]
    whole = decimal_bytes(num_parameters(plan.model) * size)
    yield f"  all gradients: {whole}, added up over two ranks at that rate."


def _flops(question: UnitsQuestion) -> Iterator[str]:
    plan, each = question.plan, question.flops_per_token
    step = each * plan.tokens_per_step
    yield f"{plan.model.name}: model FLOPs, forward and backward (cost/flops.py)"
    yield ""
    yield f"  a token  {each:.4g}"
    yield (f"  a step   {plan.tokens_per_step:,} tokens x {each:.4g} = {step:.4g}")
    rows = [
        (
            f"  {100 * mfu:.0f} % MFU",
            f"{rate / 1e15:,.4g} PFLOP/s",
            f"{duration(step / rate)} a step",
            f"{short_count(rate / each)} tokens/s",
            f"{short_count(rate / each / plan.cluster.num_devices)} a device",
        )
        for mfu, rate in _rates(question)
    ]
    if rows:
        yield table(("", "", "", "", ""), rows)
    else:
        yield from wrapped("The peak of this device is not known in this dtype.", "  ", "  ")
