# SPDX-License-Identifier: Apache-2.0
"""The frameworks that are known: which of them a program is, and what reads its values.

A framework is one entry. The first that knows a program reads it; torch reads what is left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from echelon.proof.verify.placement.deepspeed import DeepSpeedStore, is_deepspeed
from echelon.proof.verify.placement.echelon import EchelonStore, is_echelon
from echelon.proof.verify.placement.megatron import MegatronStore, is_megatron
from echelon.proof.verify.placement.program import Program
from echelon.proof.verify.placement.torch_store import Fsdp1Store, TorchStore, is_fsdp1


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """Name a framework, say which programs are of it, and what reads their values."""

    name: str
    knows: Callable[[Program], bool]
    store: Callable[[Program], Any]


FRAMEWORKS: tuple[Framework, ...] = (
    Framework(name="Echelon", knows=is_echelon, store=EchelonStore),
    Framework(name="DeepSpeed", knows=is_deepspeed, store=DeepSpeedStore),
    Framework(name="Megatron", knows=is_megatron, store=MegatronStore),
    Framework(name="FSDP1", knows=is_fsdp1, store=Fsdp1Store),
    Framework(name="torch", knows=lambda _: True, store=TorchStore),
)


def open_store(program: Program) -> Any:
    """Return what reads the values of a program."""
    found = next(one for one in FRAMEWORKS if one.knows(program))
    store = found.store(program)
    store.framework = found.name
    return store
