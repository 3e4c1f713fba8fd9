# SPDX-License-Identifier: Apache-2.0
"""What kernels of our trainer were measured to reach on a generation of devices.

The shares in presets of devices were fitted to published runs together with the constants of other
trainers, mostly of hundreds of devices: they say what those trainers' steps are made of. Of our own
trainer single kernels were measured, on one device. A device whose preset names a table of
`kernels.toml` is predicted by it for our trainer; each number there has its source and a band.
Beside others, devices are slower than by themselves (`IN_COMPANY`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from echelon.core.choices.kernels import cudnn_takes_squares
from echelon.core.cluster import NOT_MEASURED, Cluster, Device
from echelon.core.plan import Plan
from echelon.cost.inputs.numbers import MachineNumbers

IN_COMPANY = 0.95
"""What of these rates a device keeps where others compute beside it: power and cooling that servers
share, clocks that differ. With the kernels of [hopper], published runs on H100 take 1.05 of what
the formulas say: Megatron-Core on 8 to 2,048 of them with cuDNN's attention 1.02 to 1.05, FSDP of
llm-foundry on 16 to 512 with FlashAttention-2 1.04 to 1.08 (medians of each number of devices)."""
MEASURED_DTYPES = ("bf16", "fp16")
FASTEST = "cudnn"
"""What "auto" is where a kernel of cuDNN's takes attention; FlashAttention-3, which was not
measured, counts as it."""


REPLACED = ("matmul", "half_depth", "optimizer", "attention", "attention_backward")
"""What of [device.efficiency] predicts other trainers alone where kernels were measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Hold a number that was measured, with the least and the most that it was."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRates:
    """Give the shares of the peak that a kernel of attention reaches with heads of some width."""

    kernel: str
    head_dim: int
    forward: Measured
    backward: Measured


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredKernels:
    """Hold what was measured of one generation of devices, and where."""

    source: str
    rates: Mapping[str, Measured]
    attention: tuple[AttentionRates, ...]

    def value(self, name: str) -> float:
        """Return a rate."""
        return self.rates[name].value

    def of_attention(self, kernel: str, head_dim: int) -> AttentionRates:
        """Return the rates of a kernel at the measured width that is nearest to `head_dim`."""
        own = [one for one in self.attention if one.kernel == kernel]
        return min(own, key=lambda one: (abs(one.head_dim - head_dim), one.head_dim))


@cache
def measured_tables() -> Mapping[str, MeasuredKernels]:
    """Return what was measured, by the names that presets of devices give."""
    text = (files("echelon.cost.seconds") / "measured_kernels.toml").read_text(encoding="utf-8")
    return {name: _table(table) for name, table in tomllib.loads(text).items()}


def _table(table: Mapping[str, Any]) -> MeasuredKernels:
    return MeasuredKernels(
        source=table["source"],
        rates={name: _measured(one) for name, one in table["rates"].items()},
        attention=tuple(
            AttentionRates(
                kernel=one["kernel"],
                head_dim=one["head_dim"],
                forward=_measured(one["forward"]),
                backward=_measured(one["backward"]),
            )
            for one in table["attention"]
        ),
    )


def _measured(numbers: Mapping[str, Any]) -> Measured:
    return Measured(**{name: float(numbers[name]) for name in ("value", "low", "high")})


def measured_facts(cluster: Cluster) -> Mapping[str, float]:
    """Return the constants of our trainer that were measured on such devices, by their names."""
    if cluster.device.measured == NOT_MEASURED:
        return {}
    found = measured_tables()[cluster.device.measured]
    # Rates of attention are those of its kernels, not of a device's best one.
    return {"pace": found.value("pace"), "step_s": found.value("step_s"), "fused_share": 1.0}


def replaced_efficiencies(device: Device) -> tuple[str, ...]:
    """Return the efficiencies of a device that do not predict our trainer; () where all do.

    That of memory holds where it is below what was measured.
    """
    if device.measured == NOT_MEASURED:
        return ()
    stream = measured_tables()[device.measured].value("stream_bytes_per_s")
    above = device.efficiency.memory * device.memory_bandwidth > stream
    return (*REPLACED, "memory") if above else REPLACED


def with_measured_kernels(
    machine: MachineNumbers, plan: Plan, *, dtype: str, ranks: int
) -> MachineNumbers:
    """Return a machine with the rates that our trainer's kernels reach on it, where measured.

    `plan` tells which kernel attends, `dtype` in what products are computed: those in 8 bits were
    not measured, and reach as much of their peak as the preset says. So many `ranks` compute at
    once, of all nodes.
    """
    device = plan.cluster.device
    if device.measured == NOT_MEASURED:
        return machine
    found = measured_tables()[device.measured]
    attends = found.of_attention(measured_attention_kernel(plan), plan.model.head_dim)
    keeps = IN_COMPANY if ranks > 1 else 1.0
    stream = found.value("stream_bytes_per_s") / float(machine.memory_bandwidth)
    products = found.value("matmul")
    usual = 1.0 if dtype in MEASURED_DTYPES else machine.matmul / products
    return replace(
        machine,
        peak_flops=usual * machine.peak_flops,
        matmul=keeps * products,
        half_depth=found.value("half_depth"),
        memory=keeps * min(float(machine.memory), stream),
        optimizer=keeps * found.value("optimizer"),
        attention=keeps * attends.forward.value,
        attention_backward=keeps * attends.backward.value,
    )


def measured_attention_kernel(plan: Plan) -> str:
    """Return the kernel by whose rates attention of a plan is predicted.

    cuDNN's takes full and causal squares; windows and documents are left to flash attention, a cap
    on scores to plain products.
    """
    asked, model, device = plan.layout.context.attention, plan.model, plan.cluster.device
    if asked == "plain" or model.soft_cap is not None:
        return "plain"
    windows = model.window is not None and model.window < plan.mathematics.sequence_length
    squares = not windows and plan.mathematics.documents == "joined"
    takes = cudnn_takes_squares(asked, device.capability, model.head_dim)
    return FASTEST if asked == "flash-3" or (squares and takes) else "flash"
