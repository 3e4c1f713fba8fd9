"""Which frameworks run in which mode, the fastest known first, and in which environment."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from bench.spec import MODES, SINGLE, Mode, Settings, Size

OURS = "Echelon"
ROOT = Path(__file__).resolve().parent.parent
DEFAULT_PEERS = ROOT / ".peers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Name one framework in one mode: the module that builds its step, and its interpreter."""

    label: str
    module: str
    variant: str
    mode: Mode
    python: Path

    @property
    def slug(self) -> str:
        """Return the label as part of a file name."""
        return re.sub(r"[^a-z0-9]+", "-", self.label.lower()).strip("-")

    def settings(self, size: Size) -> Settings:
        """Return what a rank of this case must know."""
        return Settings(module=self.module, variant=self.variant, size=size, mode=self.mode)


_Peer = tuple[str, str, str]
_PEERS: dict[str, tuple[_Peer, ...]] = {
    "dp2": (
        ("torch DDP", "torch_ddp", ""),
        ("DeepSpeed ZeRO-0", "deepspeed_engine", "zero0"),
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
}


def peers(mode: Mode, peers_home: Path, *, at_most: int) -> tuple[Case, ...]:
    """Return the peers of a mode, the fastest known first."""
    python = peers_home / "venv" / "bin" / "python"
    return tuple(
        Case(label=label, module=f"bench.peers.{module}", variant=variant, mode=mode, python=python)
        for label, module, variant in _PEERS[mode.name][:at_most]
    )


def ours(mode: Mode) -> Case:
    """Return Echelon in a mode, in the environment that runs this."""
    return Case(
        label=OURS,
        module="bench.echelon_case",
        variant="",
        mode=mode,
        python=Path(sys.executable),
    )


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
    """Return the modes of a comma-separated list; ValueError names an unknown one."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in MODES]
    if unknown:
        raise ValueError(f"unknown modes {unknown}; known: {', '.join(MODES)}")
    return tuple(MODES[name] for name in wanted)
