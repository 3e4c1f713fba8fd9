"""Types beside runs: what `spmd_types` says of a tensor-parallel pair, without values.

`spmd_types` (meta-pytorch, 0.2) runs code once in a mode that follows, for each axis, whether a
tensor is the same on all ranks (I or R), different (V) or a partial sum (P), and refuses what does
not fit. It needs no second process. Run it in the peers' environment:
`.peers/venv/bin/python -m tests.examples.spmd_types_check`. Exit 1 where a verdict is not
the expected one.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import spmd_types as spmd
import spmd_types.checker
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as fn
from torch.testing._internal.distributed.fake_pg import FakeStore

from echelon.core.event import NoEvents
from echelon.parallel.storage.gradients import GradientStore, Reduction
from echelon.parallel.tensor import ColumnLinear, RowLinear, TensorSplit
from echelon.parallel.transport.collectives import Group
from echelon.parallel.transport.recorder import Recorder
from tests.parallel.buckets import by_hand

RANKS = 2
TOKENS, HIDDEN, FFN = 4, 8, 6


def typed(shape: tuple[int, ...], kind: Any, group: Any) -> torch.Tensor:
    """Return a tensor that is said to be of `kind` over the tensor ranks."""
    tensor = torch.randn(shape, requires_grad=True)
    spmd.assert_type(tensor, {group: kind})
    return tensor


def pair(group: Any, *, enter: bool = True, leave: bool = True, twice: bool = False) -> Any:
    """Return the type after a column and a row layer, with the collectives that are asked for."""
    x_ND = typed((TOKENS, HIDDEN), spmd.I, group)
    up, down = (typed(shape, spmd.V, group) for shape in ((FFN, HIDDEN), (HIDDEN, FFN)))
    if enter:
        x_ND = spmd.convert(x_ND, group, src=spmd.I, dst=spmd.R)
    part_ND = fn.linear(fn.gelu(fn.linear(x_ND, up)), down)
    part_ND = spmd.reinterpret(part_ND, group, src=spmd.V, dst=spmd.P)
    if leave:
        part_ND = spmd.all_reduce(part_ND, group, src=spmd.P, dst=spmd.R)
    if twice:
        part_ND = spmd.all_reduce(part_ND, group, src=spmd.P, dst=spmd.R)
    return spmd.get_axis_local_type(fn.gelu(part_ND), group)


def norm_of_own_tokens(group: Any) -> Any:
    """Return the type of a norm over this rank's tokens with a weight that all ranks share."""
    x_ND, weight_D = typed((TOKENS, HIDDEN), spmd.V, group), typed((HIDDEN,), spmd.I, group)
    return spmd.get_axis_local_type(fn.rms_norm(x_ND, (HIDDEN,), weight_D), group)


def doubled_gradient(group: Any) -> Any:
    """Return the type of a sum that is twice too large."""
    part = typed((HIDDEN,), spmd.P, group)
    return spmd.get_axis_local_type(spmd.all_reduce(2 * part, group, src=spmd.P, dst=spmd.R), group)


def mean_of_means(group: Any) -> Any:
    """Return the type of the mean of the ranks' means, where ranks have unequal tokens."""
    losses_N = typed((TOKENS,), spmd.V, group)
    part = spmd.reinterpret(losses_N.mean() / RANKS, group, src=spmd.V, dst=spmd.P)
    return spmd.get_axis_local_type(spmd.all_reduce(part, group, src=spmd.P, dst=spmd.R), group)


def _declare(function: Any, group: Any, takes: Any, gives: Any) -> None:
    """Say what an autograd function of ours takes and gives: its inside is not looked at."""

    def typecheck_forward(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        spmd.assert_type(x, {group: takes})
        y = function.apply(x, *rest)
        spmd.assert_type(y, {group: gives})
        return y

    function.typecheck_forward = staticmethod(typecheck_forward)
    spmd.register_autograd_function(function)


def our_pair(group: Any) -> Any:
    """Return the type after our own column and row layers, whose signatures are declared."""
    store = GradientStore(Reduction())
    ours = Group("tp", tuple(range(RANKS)), 0, group, Recorder(0, NoEvents()))
    split = TensorSplit(group=ours, sequence_parallel=False, store=store)
    with spmd.no_typecheck():
        layers = nn.Linear(HIDDEN, FFN, bias=False), nn.Linear(FFN, HIDDEN, bias=False)
        weights: Any = {"column": layers[0].weight, "row": layers[1].weight}
        store.hold(by_hand(weights, [["column", "row"]]))
    for layer in layers:
        spmd.assert_type(layer.weight, {group: spmd.V})

    _declare(ColumnLinear, group, spmd.I, spmd.V)
    _declare(RowLinear, group, spmd.V, spmd.I)
    x_ND = typed((TOKENS, HIDDEN), spmd.I, group)
    part_NF: Any = ColumnLinear.apply(x_ND, [layers[0]], split)
    y_ND: Any = RowLinear.apply(fn.gelu(part_NF), layers[1], split)
    return spmd.get_axis_local_type(y_ND, group)


CASES: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "a right pair": (pair, True),
    "our own pair, by declared signatures": (our_pair, True),
    "input not marked (its gradient is never summed)": (lambda g: pair(g, enter=False), False),
    "sum after the row layer left out": (lambda g: pair(g, leave=False), False),
    "summed twice": (lambda g: pair(g, twice=True), False),
    "a norm over own tokens (Megatron-LM#1446)": (norm_of_own_tokens, False),
    "a gradient doubled": (doubled_gradient, True),
    "a mean of means": (mean_of_means, True),
}
"""What is typed, and whether the types accept it."""


def main() -> int:
    """Type every case in one process of a pretended group; print one line each."""
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    unexpected = 0
    for name, (case, accepted) in CASES.items():
        try:
            with spmd.set_current_mesh(mesh), spmd.checker.typecheck():
                said, right = f"accepted, {case(mesh.get_group('tp'))}", accepted
        except Exception as error:
            if type(error).__name__ != "SpmdTypeError":
                raise
            said, right = "refused: " + str(error).splitlines()[0], not accepted
        unexpected += not right
        print(f"{name}: {said}{'' if right else ' (not as expected)'}")
    dist.destroy_process_group()
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
