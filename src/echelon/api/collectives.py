# SPDX-License-Identifier: Apache-2.0
"""Differentiable collectives over the ranks of `torch.distributed`: `echelon.collectives`.

    import echelon as ec

    y = ec.collectives.all_gather(x)              # [n, ...] on each rank -> [N, ...] on all
    y.square().sum().backward()                   # gradients come back by a reduce-scatter

`group` is a process group of torch that this process is in; None is all ranks. Each function is
linear in the tensors of all ranks, and its backward is its transpose; backward can be
differentiated again. Every rank of the group must call the same functions in the same order, also
backward. `algorithm` says how an all-reduce, an all-gather or a reduce-scatter is made, and its
backward: "backend", or over Gloo "ring", "halving-doubling" (2, 4, 8, ... ranks), "hierarchical"
(with `ranks_per_node`), and of an all-reduce "tree".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from echelon.core.choices.collective_algorithms import (
    BACKEND,
    COLLECTIVE_ALGORITHMS,
    HIERARCHICAL,
    fits_group,
)
from echelon.core.errors import ConfigError
from echelon.core.optional import optional_package
from echelon.core.rulebook.mesh import COLLECTIVE_ARGUMENT

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from echelon.parallel.transport.collectives import Group

__all__ = ["all_gather", "all_reduce", "all_to_all", "broadcast", "reduce", "reduce_scatter"]


def all_reduce(
    x: Tensor,
    group: ProcessGroup | None = None,
    *,
    algorithm: str = BACKEND,
    ranks_per_node: int | None = None,
) -> Tensor:
    """Return the sum of `x` [...] over the ranks, [...], the same on all; `x` stays as it is.

    Backward is an all-reduce of the gradient. ConfigError where the algorithm cannot be.
    """
    ours = _group(group)
    from echelon.parallel.transport.differentiable import ALL_REDUCE, moved

    _sum_by(ours, algorithm, ranks_per_node)
    return moved(x, ours, ALL_REDUCE)


def all_gather(
    x: Tensor,
    group: ProcessGroup | None = None,
    *,
    algorithm: str = BACKEND,
    ranks_per_node: int | None = None,
) -> Tensor:
    """Return the rows [n, ...] of all ranks, [N, ...] with N = ranks x n, in the order of ranks.

    Backward is a reduce-scatter of the gradient. ConfigError where the algorithm cannot be.
    """
    ours = _group(group)
    _require_rows(x)
    _move_slices_by(ours, algorithm, ranks_per_node)
    from echelon.parallel.transport.differentiable import ALL_GATHER, moved

    return moved(x, ours, ALL_GATHER)


def reduce_scatter(
    x: Tensor,
    group: ProcessGroup | None = None,
    *,
    algorithm: str = BACKEND,
    ranks_per_node: int | None = None,
) -> Tensor:
    """Return this rank's rows, [N / ranks, ...], of the sum of `x` [N, ...] over the ranks.

    Backward is an all-gather of the gradient. ConfigError where the ranks do not divide N, and
    where the algorithm cannot be.
    """
    ours = _group(group)
    _require_rows(x)
    _require_divides(x, ours.size)
    _move_slices_by(ours, algorithm, ranks_per_node)
    from echelon.parallel.transport.differentiable import REDUCE_SCATTER, moved

    return moved(x, ours, REDUCE_SCATTER)


def all_to_all(
    x: Tensor,
    group: ProcessGroup | None = None,
    *,
    send_rows: Sequence[int] | None = None,
    receive_rows: Sequence[int] | None = None,
) -> Tensor:
    """Return the rows that all ranks send to this one, [sum of receive_rows, ...], in their order.

    `x` [sum of send_rows, ...] has the rows for rank 0, then those for rank 1, and so on:
    `send_rows[i]` go to rank i and `receive_rows[i]` come from it, which both must say alike.
    Without them all parts are equal. Backward is the all-to-all of the gradient the other way.
    """
    ours = _group(group)
    _require_rows(x)
    if send_rows is None or receive_rows is None:
        if send_rows is not receive_rows:
            raise _refused("send_rows and receive_rows are given both, or neither")
        _require_divides(x, ours.size)
        send_rows = receive_rows = [x.shape[0] // ours.size] * ours.size
    for name, rows in (("send_rows", send_rows), ("receive_rows", receive_rows)):
        if len(rows) != ours.size or min(rows) < 0:
            raise _refused(f"{name} = {list(rows)} is not a count for each of {ours.size} ranks")
    if sum(send_rows) != x.shape[0]:
        raise _refused(f"send_rows add up to {sum(send_rows)}, and x has {x.shape[0]} rows")
    if send_rows[ours.index] != receive_rows[ours.index]:
        raise _refused(
            f"this rank sends itself {send_rows[ours.index]} rows, and receives "
            f"{receive_rows[ours.index]} from itself"
        )
    from echelon.parallel.transport.differentiable import exchange_rows, moved

    return moved(x, ours, exchange_rows(tuple(send_rows), tuple(receive_rows)))


def broadcast(x: Tensor, source: int, group: ProcessGroup | None = None) -> Tensor:
    """Return `x` [...] of the rank at place `source` of the group, on all; shapes must be alike.

    Backward is a reduce: the source gets the sum of all gradients, the others zeros.
    """
    ours = _group(group)
    _require_place("source", source, ours.size)
    from echelon.parallel.transport.differentiable import from_source, moved

    return moved(x, ours, from_source(source))


def reduce(x: Tensor, root: int, group: ProcessGroup | None = None) -> Tensor:
    """Return the sum of `x` [...] over the ranks at place `root` of the group, zeros on the others.

    Backward is a broadcast of the gradient of the root.
    """
    ours = _group(group)
    _require_place("root", root, ours.size)
    from echelon.parallel.transport.differentiable import from_source, moved

    broadcast, reduction = from_source(root)
    return moved(x, ours, (reduction, broadcast))


def _refused(message: str, *suggestions: str) -> ConfigError:
    return ConfigError([COLLECTIVE_ARGUMENT.problem(message, suggestions=suggestions)])


def _group(group: ProcessGroup | None) -> Group:
    """Return a group of torch as ours, its communicator the same for each call."""
    torch = optional_package("torch", extra="train", purpose="a collective")
    if not torch.distributed.is_initialized():
        way = 'torch.distributed.init_process_group("gloo")'
        raise _refused("this process has joined no others: there is no process group", way)
    from echelon.parallel.device_mesh import joined_group

    return joined_group(group)


def _move_slices_by(group: Group, algorithm: str, ranks_per_node: int | None) -> None:
    _sum_by(group, algorithm, ranks_per_node)
    if algorithm != BACKEND and not COLLECTIVE_ALGORITHMS[algorithm].scatters:
        others = [name for name, one in COLLECTIVE_ALGORITHMS.items() if one.scatters]
        raise _refused(
            f'algorithm = "{algorithm}" sums whole tensors, and scatters and gathers nothing',
            *(f'algorithm = "{name}"' for name in others),
        )


def _sum_by(group: Group, algorithm: str, ranks_per_node: int | None) -> None:
    from echelon.cost.bytes.all_reduce import SumGroup

    if algorithm == BACKEND:
        if ranks_per_node is not None:
            raise _refused('ranks_per_node changes nothing with algorithm="backend"')
        return
    if algorithm not in COLLECTIVE_ALGORITHMS:
        raise _refused(f"algorithm = {algorithm!r} is none of {', '.join(COLLECTIVE_ALGORITHMS)}")
    if (algorithm == HIERARCHICAL) != (ranks_per_node is not None):
        raise _refused('ranks_per_node is for algorithm="hierarchical", which needs it')
    if group.communicator is not None and not group.communicator.is_gloo:
        raise _refused(f'algorithm = "{algorithm}" is made of messages over Gloo, not NCCL')
    each, places = ranks_per_node or group.size, range(group.size)
    if each < 1 or not fits_group(algorithm, places, each):
        need = COLLECTIVE_ALGORITHMS[algorithm].divides
        raise _refused(f'algorithm = "{algorithm}" over {group.size} ranks, but {need}')
    nodes = tuple(place // each for place in places)
    group.sum_by(SumGroup(algorithm=algorithm, place=group.index, nodes=nodes))


def _require_rows(x: Tensor) -> None:
    if x.dim() == 0:
        raise _refused("x has no rows: its shape is [], and its first dim is what is split")


def _require_divides(x: Tensor, size: int) -> None:
    if x.shape[0] % size:
        rows = x.shape[0]
        raise _refused(f"{size} ranks do not divide {rows} rows ({rows} % {size} = {rows % size})")


def _require_place(name: str, place: int, size: int) -> None:
    if not 0 <= place < size:
        raise _refused(f"{name} = {place} is no place in a group of {size} ranks")
