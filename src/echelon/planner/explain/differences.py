"""What two plans of searches have otherwise, choice by choice, in words."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.planner.choice import Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Name a choice that two plans have otherwise."""

    name: str
    old: str
    new: str


def differences(old: Choice, new: Choice) -> tuple[Difference, ...]:
    """Return what one plan has otherwise than another one."""
    before, after = _said(old), _said(new)
    return tuple(
        Difference(name=name, old=before[name], new=after[name])
        for name in before
        if before[name] != after[name]
    )


def _said(choice: Choice) -> dict[str, str]:
    """Return the choices of a plan as words; those that follow from others are left out."""
    mesh = choice.mesh
    again = {0: "none", 1: "full"}.get(choice.recompute, f"every {choice.recompute}")
    shared = f"{mesh.dp_replicate}x{mesh.dp_shard}" if mesh.dp_replicate > 1 else str(mesh.dp)
    words = {
        "devices": choice.devices,
        "tp": mesh.tp,
        "pp": mesh.pp,
        "cp": mesh.cp,
        "dp": shared,
        "ep": mesh.ep,
        "ZeRO": choice.zero,
        "microbatch": choice.microbatch,
        "schedule": choice.schedule if mesh.pp > 1 else "none",
        "virtual stages": choice.virtual,
        "recompute": again,
        "sequence parallel": "on" if choice.sequence_parallel else "off",
        "context": choice.context if mesh.cp > 1 else "none",
        "expert tp": choice.expert_tp,
        "offload": "host" if choice.offload else "none",
    }
    return {name: str(value) for name, value in words.items()}
