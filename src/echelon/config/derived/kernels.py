# SPDX-License-Identifier: Apache-2.0
"""Settings of kernels: what "auto" means, and which pieces a model has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from echelon.config.view import View
from echelon.core.choices.kernels import FUSED_PIECES, FusedPiece, KernelProvider, Kernels
from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.cluster import Cluster

PROVIDER_KEY, FUSED_KEY = "kernels.provider", "kernels.fused"


def kernel_provider(view: View, cluster: Cluster) -> tuple[KernelProvider, str]:
    """Return what computes the pieces, and why."""
    chosen = view.word(PROVIDER_KEY)
    if chosen != "auto":
        return cast(KernelProvider, chosen), view.entry(PROVIDER_KEY).source
    if cluster.backend == "nccl":
        return "triton", "derived: the devices are GPUs"
    return "plain", "derived: the devices are processors"


def missing_pieces(view: View, provider: KernelProvider) -> dict[FusedPiece, str]:
    """Return the pieces that a run does not have, and why."""
    found: dict[FusedPiece, str] = {}
    if view.word("model.norm") != "rmsnorm":
        found["norm"] = 'model.norm = "layernorm", which PyTorch has a kernel of'
        found["residual"] = found["norm"]
    if view.word("model.positions") != "rope":
        found["rotary"] = "the model has no rotary positions"
    elif view.flag("model.qk_norm") and view.word("model.qk_norm_over") == "width":
        found["rotary"] = 'model.qk_norm_over = "width"'
    if view.word("model.norm_place") == "after":
        found.setdefault("residual", 'model.norm_place = "after"')
    if not view.flag("model.gated"):
        found["swiglu"] = "the model's MLP has no gate"
    elif (activation := view.word("model.activation")) != "silu":
        found["swiglu"] = f'model.activation = "{activation}"'
    elif view.has_table("model.experts") and view.value("model.experts.limit") != "none":
        found["swiglu"] = "model.experts.limit makes it a clamped SwiGLU"
    record, master = OPTIMIZERS[view.word("optimizer.kind")], view.word("precision.master")
    if provider != "triton":
        found["update"] = f'{PROVIDER_KEY} = "{provider}" has no kernel of it'
    elif master != "fp32":
        found["update"] = f'its kernel is of fp32, and precision.master = "{master}"'
    elif not (record.one_pass or (record.others and OPTIMIZERS[record.others].one_pass)):
        found["update"] = f'optimizer.kind = "{record.name}" has no kernel of it'
    return found


def pieces_of_run(view: View, provider: KernelProvider) -> tuple[FusedPiece, ...]:
    """Return the pieces that a run has."""
    missing = missing_pieces(view, provider)
    return tuple(one for one in FUSED_PIECES if one not in missing)


def read_kernels(view: View, cluster: Cluster) -> tuple[Kernels, dict[str, tuple[object, str]]]:
    """Return the kernels of a run, and value and source of what was left to us."""
    provider, source = kernel_provider(view, cluster)
    derived: dict[str, tuple[object, str]] = {}
    if view.word(PROVIDER_KEY) == "auto":
        derived[PROVIDER_KEY] = provider, source
    if provider == "plain":
        return Kernels(), derived
    fused = view.value(FUSED_KEY)
    if fused == "auto":
        fused = pieces_of_run(view, provider)
        derived[FUSED_KEY] = list(fused), "derived: the pieces that the run has"
    return Kernels(provider=provider, fused=tuple(cast("Sequence[FusedPiece]", fused))), derived
