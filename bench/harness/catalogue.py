"""Which frameworks run in which mode, the fastest known first, and in which environment."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from bench.harness.spec import (
    CONTEXT_MODES,
    MODES,
    SINGLE,
    ZERO_BUBBLE_MODES,
    ZERO_MODES,
    Mode,
    Settings,
    Size,
)

OURS = "Echelon"
ROOT = Path(__file__).resolve().parents[2]
DEFAULT_PEERS = ROOT / ".peers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Name one framework in one mode: the module that builds its step, and its interpreter.

    `root` is the tree whose `bench` and `src` its ranks import.
    """

    label: str
    module: str
    variant: str
    mode: Mode
    python: Path
    root: Path = ROOT

    @property
    def slug(self) -> str:
        """Return the label as part of a file name."""
        return re.sub(r"[^a-z0-9]+", "-", self.label.lower()).strip("-")

    def settings(self, size: Size) -> Settings:
        """Return what a rank of this case must know."""
        return Settings(module=self.module, variant=self.variant, size=size, mode=self.mode)


_Peer = tuple[str, str, str]
_CONTEXT_PEERS: tuple[_Peer, ...] = (
    ("torch Ulysses by hand", "torch_cp", "ulysses"),
    ("picotron ring", "picotron_cp", ""),
    ("torch ring by hand", "torch_cp", "ring"),
    ("DeepSpeed Ulysses", "deepspeed_engine", "ulysses"),
    ("torch context_parallel", "torch_cp", "experimental"),
)
_PEERS: dict[str, tuple[_Peer, ...]] = {
    "dp2": (
        ("torch DDP", "torch_ddp", ""),
        ("DeepSpeed ZeRO-0", "deepspeed_engine", "zero"),
        ("Accelerate DDP", "torch_ddp", "accelerate"),
        ("megatron-core", "megatron", ""),
        ("megatron-core overlap", "megatron", "overlap"),
    ),
    "tp2": (
        ("megatron-core", "megatron", ""),
        ("torch DTensor shared inputs", "torch_tp", "shared"),
        ("torch DTensor", "torch_tp", "plain"),
        ("DeepSpeed AutoTP", "deepspeed_engine", "autotp"),
    ),
    # megatron-core's torch layers refuse sequence parallelism; its other layers need a GPU.
    "tp2sp": (
        ("torch DTensor", "torch_tp", "shared"),
        ("torchtitan", "torchtitan_llama", ""),
    ),
    "pp2": (
        ("DeepSpeed PipelineModule", "deepspeed_engine", "pipe"),
        ("torch pipelining", "torch_pp", ""),
        ("megatron-core", "megatron", ""),
    ),
    "dp2xtp2": (
        ("megatron-core", "megatron", ""),
        ("torch replicate + DTensor", "torch_tp", "shared"),
        ("megatron-core overlap", "megatron", "overlap"),
        ("torch FSDP2 + DTensor", "torch_fsdp", "shared"),
    ),
    "dp2xpp2": (
        ("DeepSpeed PipelineModule", "deepspeed_engine", "pipe"),
        ("torch DDP + pipelining", "torch_pp", ""),
        ("megatron-core", "megatron", ""),
    ),
    "tp2xpp2": (
        ("megatron-core", "megatron", ""),
        ("torch DTensor + pipelining", "torch_pp", "shared"),
    ),
    # Whatever lets each query meet each key competes with both kinds of Echelon.
    "cp2": _CONTEXT_PEERS,
    "cp2u": _CONTEXT_PEERS,
}
_ZERO_PEERS: dict[int, tuple[_Peer, ...]] = {
    0: (
        ("torch DDP", "torch_ddp", ""),
        ("DeepSpeed ZeRO-0", "deepspeed_engine", "zero"),
        ("megatron-core", "megatron", ""),
    ),
    1: (
        ("torch ZeroRedundancyOptimizer", "torch_ddp", "zero1"),
        ("DeepSpeed ZeRO-1", "deepspeed_engine", "zero"),
        ("megatron-core distributed optimizer", "megatron", "zero1"),
        ("megatron-core distributed optimizer, overlap", "megatron", "zero1 overlap"),
    ),
    2: (
        ("DeepSpeed ZeRO-2", "deepspeed_engine", "zero"),
        ("torch FSDP2, kept after forward", "torch_fsdp", ""),
        ("torchtitan FSDP2, kept after forward", "torchtitan_llama", "fsdp"),
    ),
    3: (
        ("torchtitan FSDP2", "torchtitan_llama", "fsdp"),
        ("torch FSDP2", "torch_fsdp", ""),
        ("torch FSDP2, root kept", "torch_fsdp", "root kept"),
        ("DeepSpeed ZeRO-3", "deepspeed_engine", "zero"),
    ),
}
"""Which frameworks serve a stage, the fastest known first."""

_HYBRID_PEERS: tuple[_Peer, ...] = (
    ("torchtitan HSDP", "torchtitan_llama", "fsdp"),
    ("torch FSDP2 HSDP", "torch_fsdp", ""),
)

_MODULE_PEERS: dict[str, tuple[_Peer, ...]] = {
    "dp2": (
        ("torch DDP", "torch_ddp", ""),
        ("Accelerate DDP", "torch_ddp", "accelerate"),
        ("DeepSpeed ZeRO-0", "deepspeed_engine", "zero"),
    ),
    "tp2": (
        ("torch DTensor shared inputs", "torch_tp", "shared"),
        ("transformers tp_plan", "transformers_tp", ""),
        ("DeepSpeed AutoTP", "deepspeed_engine", "autotp"),
    ),
    "tp2sp": (("torch DTensor", "torch_tp", "shared"),),
    "pp2": (
        ("torch pipelining", "torch_pp", ""),
        ("DeepSpeed PipelineModule", "deepspeed_engine", "pipe"),
    ),
    "pp2zb": (
        ("torch pipelining 1F1B", "torch_pp", ""),
        ("DeepSpeed PipelineModule 1F1B", "deepspeed_engine", "pipe"),
    ),
    "cp2": tuple(peer for peer in _CONTEXT_PEERS if not peer[1].startswith("picotron")),
    "zero3-2": (
        ("torch FSDP2", "torch_fsdp", ""),
        ("torch FSDP2, root kept", "torch_fsdp", "root kept"),
        ("DeepSpeed ZeRO-3", "deepspeed_engine", "zero"),
        ("Accelerate + DeepSpeed ZeRO-3", "deepspeed_engine", "accelerate"),
    ),
}
"""What trains the same module of transformers; where nothing is named, see `_PEERS`."""


def peers(
    mode: Mode, peers_home: Path, *, at_most: int, own_module: bool = False
) -> tuple[Case, ...]:
    """Return the peers of a mode, the fastest known first."""
    python = peers_home / "venv" / "bin" / "python"
    found = _peers_of(mode)
    if own_module:
        found = _MODULE_PEERS.get(mode.name, found)
    return tuple(
        Case(label=label, module=f"bench.peers.{module}", variant=variant, mode=mode, python=python)
        for label, module, variant in found[:at_most]
    )


def _peers_of(mode: Mode) -> tuple[_Peer, ...]:
    if mode.name in _PEERS:
        return _PEERS[mode.name]
    hybrid = mode.zero_stage > 0 and mode.dp_replicate > 1
    return _HYBRID_PEERS if hybrid else _ZERO_PEERS[mode.zero_stage]


def ours(mode: Mode) -> Case:
    """Return Echelon with its own model in a mode, in the environment that runs this."""
    return Case(
        label=OURS,
        module="bench.harness.echelon_case",
        variant="",
        mode=mode,
        python=Path(sys.executable),
    )


def own_module(mode: Mode, peers_home: Path) -> Case:
    """Return Echelon with the module that the peers train, in their environment if it is there.

    What `transformers` loads with it counts as memory of a rank: libraries that one environment has
    and the other has not would be in the comparison.
    """
    python = peers_home / "venv" / "bin" / "python"
    case = replace(ours(mode), module="bench.harness.module_case")
    return replace(case, python=python) if python.exists() else case


def single(peers_home: Path) -> Case:
    """Return plain torch in one process with one thread: what limits are computed from."""
    return Case(
        label="plain torch, 1 thread",
        module="bench.peers.plain",
        variant="",
        mode=SINGLE,
        python=peers_home / "venv" / "bin" / "python",
    )


def chosen_modes(names: str) -> tuple[Mode, ...]:
    """The modes of a comma-separated list, "zero" being all of ZeRO; ValueError names another."""
    known = {**MODES, **ZERO_MODES, **CONTEXT_MODES, **ZERO_BUBBLE_MODES}
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in (*known, "zero")]
    if unknown:
        raise ValueError(f"unknown modes {unknown}; known: {', '.join(known)}")
    return tuple(
        mode
        for name in wanted
        for mode in (ZERO_MODES.values() if name == "zero" else (known[name],))
    )
