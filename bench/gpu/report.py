"""The results of a GPU as Markdown tables, with date and device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.gpu.loads import LOADS, Case
from echelon.cost.seconds.kernels import model_flops_per_token

_HEAD = (
    *("model", "case", "ms/step", "spread", "tokens/s", "MFU"),
    *("peak GB", "launches", "loss", "predicted ms", "predicted GB", "graphs (breaks)"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Say where and when results were taken; `peak_flops` None: no utilization can be stated."""

    date: str
    device: str
    torch: str
    driver: str
    peak_flops: float | None

    def heading(self) -> str:
        """Return the lines that every page of results begins with."""
        peak = "not known (no MFU)"
        if self.peak_flops is not None:
            peak = f"{self.peak_flops / 1e12:.0f} TFLOP/s bf16, dense"
        return (
            f"# One GPU, {self.date}\n\n"
            f"{self.device}; peak {peak}; torch {self.torch}; driver {self.driver}.\n"
            "`bench/gpu/run.sh`: bf16 parameters, activations and gradients, fp32 master copy and\n"
            "AdamW; nothing recomputed. MFU: PaLM, appendix B. Peak: what tensors took.\n"
            "Predicted: by the planner for Echelon's own steps, in brackets how far it is off.\n"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Hold what one case came to: the figures of `bench.gpu.measure`, or why there are none."""

    load: str
    sequences: int
    case: Case
    figures: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    predicted_s: float | None = None
    predicted_bytes: float | None = None

    def row(self, peak_flops: float | None) -> str:
        """Return the outcome as one row of a table."""
        name = f"{self.load}, {self.sequences} x {LOADS[self.load].length}"
        if self.reason:
            empty = " |" * (len(_HEAD) - 3)
            return f"| {name} | {self.case.label} | not run: {self.reason} |{empty}"
        one = self.figures
        launches = one["launches"]
        rate = self.tokens_per_s()
        cells = (
            *(name, self.case.label, f"{one['step_s'] * 1e3:.1f}", f"{one['spread']:.0%}"),
            *(f"{rate:,.0f}", _share(self.utilization(peak_flops))),
            *(f"{one['peak_bytes'] / 1e9:.2f}", "-" if launches is None else str(launches)),
            f"{one['first_loss']:.3f} -> {one['last_loss']:.3f}",
            _beside(self.predicted_s, one["step_s"], 1e3, 1),
            _beside(self.predicted_bytes, one["peak_bytes"], 1e-9, 2),
            f"{one['graphs']} ({one['graph_breaks']})" if self.case.compiles else "-",
        )
        return f"| {' | '.join(cells)} |"

    def tokens_per_s(self) -> float:
        """Return the tokens trained per second."""
        return self.sequences * LOADS[self.load].length / self.figures["step_s"]

    def utilization(self, peak_flops: float | None) -> float | None:
        """Return the model FLOPs utilization, where the peak of the device is known."""
        if peak_flops is None:
            return None
        load = LOADS[self.load]
        return self.tokens_per_s() * model_flops_per_token(load.shape, load.length) / peak_flops

    def kernels(self) -> str:
        """Return the longest kernels of a step as a table of its own."""
        if self.reason:
            return ""
        lines = [
            f"\n{self.load}, {self.case.label}\n",
            "| ms/step | of the step | calls | kernel |",
            "|---|---|---|---|",
        ]
        for name, calls, seconds in self.figures["kernels"]:
            share = seconds / self.figures["step_s"]
            short = str(name).replace("|", "/")[:120]
            lines.append(f"| {seconds * 1e3:.2f} | {share:.0%} | {calls} | `{short}` |")
        return "\n".join(lines)


def table(outcomes: Iterable[Outcome], peak_flops: float | None) -> str:
    """Return outcomes as one Markdown table, model by model."""
    order = list(LOADS)
    outcomes = sorted(outcomes, key=lambda outcome: order.index(outcome.load))
    lines = [f"| {' | '.join(_HEAD)} |", "|" + "---|" * len(_HEAD)]
    return "\n".join([*lines, *(outcome.row(peak_flops) for outcome in outcomes)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Hold what the parts of a run have come to so far; text is Markdown."""

    tests: str = ""
    training: Sequence[Outcome] = ()
    offload: Sequence[Outcome] = ()
    kernels: str = ""
    experts: str = ""


def page(machine: Machine, found: Findings) -> str:
    """Return the whole page of results."""
    longest = [outcome.kernels() for outcome in (*found.training, *found.offload)]
    parts = [
        machine.heading(),
        f"## Tests\n\n`tests/cuda`: {found.tests or 'not run'}\n",
        f"## Training steps, side by side\n\n{_or_not_run(found.training, machine)}\n",
        f"## Kernels\n\n{found.kernels or 'Not run.'}\n",
        f"## Offload\n\n{_or_not_run(found.offload, machine)}\n",
        f"## One block of experts\n\n{found.experts or 'Not run.'}\n",
        f"## The ten longest kernels of a step\n{_newlines(longest)}\n",
    ]
    return "\n".join(parts)


def not_run(date: str, reason: str) -> str:
    """Return the page that stands where no GPU was at hand."""
    return (
        f"# One GPU, {date}\n\nNot run: {reason}.\n\n"
        "`bench/gpu/run.sh` on a machine with one CUDA GPU writes the tests of `tests/cuda`, and\n"
        "the tables of training steps, kernels, offload and experts here.\n"
    )


def _or_not_run(outcomes: Sequence[Outcome], machine: Machine) -> str:
    return table(outcomes, machine.peak_flops) if outcomes else "Not run."


def _newlines(texts: Iterable[str]) -> str:
    return "\n".join(text for text in texts if text) or "\nNot run."


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _beside(predicted: float | None, measured: float, scale: float, digits: int) -> str:
    """Return a prediction with its relative error."""
    if predicted is None:
        return "-"
    return f"{predicted * scale:.{digits}f} ({predicted / measured - 1:+.0%})"
