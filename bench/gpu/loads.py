"""What is measured on a GPU: Llama-shaped models, frameworks and settings. No torch."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from echelon.config.presets import read_preset
from echelon.core.choices.kernels import KernelProvider
from echelon.core.cluster import Device, Efficiency
from echelon.core.model_shape import ModelShape
from echelon.core.parameters import num_parameters
from echelon.core.plan import OffloadTarget

Framework = Literal["plain", "transformers", "echelon"]

STATE_BYTES = 20
"""Per parameter: bf16 values and gradients, fp32 master, two moments, gradients as fp32."""

STATE_ON_GPU_BYTES = 4
"""Of these where the optimizer is elsewhere: bf16 values and gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Give a model and the batch of one step: `sequences` of `length` tokens."""

    name: str
    shape: ModelShape
    length: int
    sequences: int

    @property
    def tokens(self) -> int:
        """Return the tokens of one step."""
        return self.sequences * self.length

    def likely_bytes(self, sequences: int, state_bytes: int = STATE_BYTES) -> int:
        """Return about what a step of so many sequences needs, nothing recomputed.

        Per token and block 16 rows of the stream and 6 of the MLP in two bytes, which plain
        PyTorch keeps for backward, and 14 bytes for each logit: an estimate, to choose a batch.
        """
        shape = self.shape
        per_token = shape.layers * 2 * (16 * shape.hidden + 6 * shape.ffn) + 14 * shape.vocab
        return state_bytes * num_parameters(shape) + sequences * self.length * per_token

    def fitting_sequences(self, memory_bytes: int, state_bytes: int = STATE_BYTES) -> int:
        """Return how many sequences fit, halved from the full batch; 0 where not even one does."""
        sequences = self.sequences
        while sequences and self.likely_bytes(sequences, state_bytes) > memory_bytes:
            sequences //= 2
        return sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Name one way to train: a framework, eager or compiled; of Echelon its kernels, and ZeRO."""

    framework: Framework
    compiled: bool = False
    kernels: KernelProvider = "triton"
    autocast: bool = False
    zero_stage: Literal[0, 3] = 0
    optimizer_home: OffloadTarget = "none"
    parameter_home: OffloadTarget = "none"

    @property
    def label(self) -> str:
        """Return what the table calls it."""
        names = {"plain": "plain PyTorch", "transformers": "transformers Llama"}
        parts = [names.get(self.framework, f"Echelon ZeRO-{self.zero_stage}")]
        parts += ["autocast"] * self.autocast
        homes = {"host": "host memory", "nvme": "files"}
        if self.optimizer_home != "none":
            parts.append(f"optimizer in {homes[self.optimizer_home]}")
        if self.parameter_home != "none":
            parts.append(f"parameters in {homes[self.parameter_home]}")
        how = "compiled" if self.compiled else "eager"
        if self.framework == "echelon":
            how = f"{self.kernels} kernels"
        return ", ".join([*parts, how])

    @property
    def compiles(self) -> bool:
        """Return whether PyTorch's compiler makes any of it."""
        return self.compiled or (self.framework == "echelon" and self.kernels == "compiled")

    @property
    def state_bytes(self) -> int:
        """Return the bytes of a parameter that rest on the GPU."""
        return STATE_BYTES if self.optimizer_home == "none" else STATE_ON_GPU_BYTES

    def bytes_at(self, home: OffloadTarget) -> int:
        """Return the bytes of a parameter that rest there: master and moments, and its values."""
        return 12 * (self.optimizer_home == home) + 2 * (self.parameter_home == home)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Hold all that the process which measures one case must know; crosses as JSON."""

    load: str
    sequences: int
    case: Case
    device: Literal["cuda", "cpu"] = "cuda"
    warmup: int = 3
    steps: int = 5
    repeats: int = 3
    compile_backend: str = "inductor"
    offload_dir: str = ""
    learning_rate: float = 3e-4
    weight_decay: float = 0.01
    seed: int = 1234

    def to_json(self) -> str:
        """Return the settings as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Return the settings that `to_json` wrote."""
        data: dict[str, Any] = json.loads(text)
        return cls(**{**data, "case": Case(**data["case"])})


def _loads() -> dict[str, Load]:
    path = Path(__file__).parents[1] / "data" / "gpu_models.csv"
    with path.open(encoding="utf-8", newline="") as file:
        rows: list[dict[str, Any]] = [
            {k: v if k == "name" else int(v) for k, v in row.items()}
            for row in csv.DictReader(file)
        ]
    found: dict[str, Load] = {}
    for row in rows:
        name, length, sequences = (row.pop(key) for key in ("name", "length", "sequences"))
        shape = ModelShape(
            name=name, head_dim=row["hidden"] // row["heads"], max_positions=length, **row
        )
        found[name] = Load(name=name, shape=shape, length=length, sequences=sequences)
    return found


LOADS = _loads()
"""All but "tiny" are measured, which shows on any machine that the command works.

Llama 3 8B with masters and moments needs 160 GB: more than an H200 has. It is trained with the
optimizer in host memory; half of its blocks fit, and show what its shapes reach.
"""

TRAINING = (
    Case(framework="echelon"),
    Case(framework="plain", compiled=True),
    Case(framework="echelon", kernels="plain"),
    Case(framework="plain"),
    Case(framework="echelon", kernels="compiled"),
    Case(framework="transformers", compiled=True),
    Case(framework="transformers"),
    Case(framework="echelon", zero_stage=3),
    Case(framework="echelon", zero_stage=3, kernels="compiled"),
    Case(framework="plain", compiled=True, autocast=True),
    Case(framework="plain", autocast=True),
)
"""Side by side: bf16 parameters, activations and gradients, an fp32 master copy and AdamW.

The first are measured first on every model, and so the last to be left out where time is short.
"""

OFFLOAD = (
    Case(framework="echelon", zero_stage=3),
    Case(framework="echelon", zero_stage=3, optimizer_home="host"),
    Case(framework="echelon", zero_stage=3, optimizer_home="host", parameter_home="host"),
    Case(framework="echelon", zero_stage=3, optimizer_home="nvme"),
    Case(framework="echelon", zero_stage=3, optimizer_home="nvme", parameter_home="nvme"),
)
"""What rests where between uses, beside all of it on the GPU."""

_PEAKS = (
    # Dense bf16 FLOP/s with fp32 accumulation, from NVIDIA's data sheets; the first match counts.
    ("b200", 2250e12),
    ("h200|gh200", 989e12),
    ("h100.*pcie", 756e12),
    ("h100.*nvl", 835e12),
    ("h100|h800", 989e12),
    ("a100|a800", 312e12),
    ("l40s", 362e12),
    ("rtx pro 6000", 503e12),
    ("rtx 5090", 209.5e12),
    ("rtx 4090", 165.2e12),
    ("rtx 3090", 71e12),
    ("a10g", 70e12),
    ("a10", 125e12),
    ("l4", 121e12),
)


_PRESETS = ("gh200", "h200", "h100", "b200")
"""Clusters whose device is found by the name that the driver gives it."""


def peak_flops(device_name: str) -> float | None:
    """Return the dense bf16 peak of a GPU in FLOP/s, None where it is not known."""
    for pattern, peak in _PEAKS:
        if re.search(rf"\b({pattern})\b", device_name.lower()):
            return peak
    return None


def known_device(device_name: str) -> Device | None:
    """Return what the planner knows of a GPU, None where it has no preset of it."""
    if re.search(r"\b(pcie|nvl)\b", device_name.lower()):
        return None
    for name in _PRESETS:
        found = read_preset("clusters", name)
        if found is None or not re.search(rf"\b{name}\b", device_name.lower()):
            continue
        tables: Any = found.tables
        device = dict(tables["device"])
        peaks = tuple(device.pop("peak_flops").items())
        efficiency = Efficiency(**device.pop("efficiency", {}))
        return Device(**device, peak_flops=peaks, efficiency=efficiency)
    return None


def memory_bandwidth(device_name: str) -> float | None:
    """Return the bytes that a GPU's memory moves in a second, None where that is not known."""
    device = known_device(device_name)
    return None if device is None else device.memory_bandwidth
