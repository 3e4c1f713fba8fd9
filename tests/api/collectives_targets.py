"""What ranks run in the tests of differentiable collectives."""

from __future__ import annotations

from collections.abc import Callable

import torch

import echelon as ec
from echelon.core.errors import ConfigError
from echelon.launch.context import RankContext
from echelon.parallel.device_mesh import joined_group
from echelon.parallel.transport import rows

Function = Callable[[torch.Tensor], torch.Tensor]
WIDTH = 1
"""Columns of every tensor."""


def splits(size: int, sender: int) -> list[int]:
    """Return how many rows `sender` sends to each rank: all different, some none."""
    return [(sender + 2 * place) % 3 for place in range(size)]


def uneven(rank: int, size: int) -> Function:
    """Return an all-to-all with splits of many sizes."""
    sent, got = splits(size, rank), [splits(size, other)[rank] for other in range(size)]
    return lambda x: ec.collectives.all_to_all(x[: sum(sent)], send_rows=sent, receive_rows=got)


def functions(rank: int, size: int) -> dict[str, Function]:
    """Return every collective, over all ranks."""
    found: dict[str, Function] = {
        "all_reduce": ec.collectives.all_reduce,
        "all_gather": ec.collectives.all_gather,
        "reduce_scatter": ec.collectives.reduce_scatter,
        "all_to_all": ec.collectives.all_to_all,
        "all_to_all uneven": uneven(rank, size),
        "broadcast": lambda x: ec.collectives.broadcast(x, 1),
        "reduce": lambda x: ec.collectives.reduce(x, size - 1),
    }
    for name in ("ring", "tree"):
        found[name] = lambda x, name=name: ec.collectives.all_reduce(x, algorithm=name)
    if size == 4:
        found["halving-doubling"] = lambda x: ec.collectives.all_reduce(
            x, algorithm="halving-doubling"
        )
        found["hierarchical"] = lambda x: ec.collectives.all_reduce(
            x, algorithm="hierarchical", ranks_per_node=2
        )
        for each in (ec.collectives.all_gather, ec.collectives.reduce_scatter):
            found[f"{each.__name__} halving-doubling"] = lambda x, each=each: each(
                x, algorithm="halving-doubling"
            )
            found[f"{each.__name__} hierarchical"] = lambda x, each=each: each(
                x, algorithm="hierarchical", ranks_per_node=2
            )
    for each in (ec.collectives.all_gather, ec.collectives.reduce_scatter):
        found[f"{each.__name__} ring"] = lambda x, each=each: each(x, algorithm="ring")
    return found


def values(size: int) -> torch.Tensor:
    """Return the tensors [ranks, rows, width] of all ranks."""
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, 2 * size, WIDTH, dtype=torch.float64, generator=generator)


def check_each(context: RankContext, _: None) -> dict[str, tuple[torch.Tensor, bool, bool]]:
    """Return the result of each, and whether its first and second derivatives are right.

    One function of the tensors of all ranks is checked on all of them in lockstep: each rank takes
    its own tensor, and the sum of all results, weighted by rank, is the same on all.
    """
    group = joined_group(None)
    x_RND = values(group.size)
    found: dict[str, tuple[torch.Tensor, bool, bool]] = {}
    for name, function in functions(context.rank, context.world_size).items():

        def whole(x: torch.Tensor, function: Function = function) -> torch.Tensor:
            shared = rows.MoveRows.apply(x, group, "check", rows.SUM_GRADIENT)
            y = function(shared[group.index])
            # Rows of different ranks are told apart; rows that one lacks are zeros.
            most = 2 * group.size * group.size
            padded = torch.zeros(group.size * most, WIDTH, dtype=y.dtype)
            place = torch.arange(len(y)) + group.index * most
            placed = padded.index_add(0, place, y.square())
            every = rows.MoveRows.apply(placed, group, "check", rows.SUM_ROWS)
            # Three numbers of all results: as many backward passes find every wrong entry.
            generator = torch.Generator().manual_seed(0)
            weights = torch.randn(3, every.numel(), dtype=y.dtype, generator=generator)
            return weights @ every.view(-1)

        x = x_RND.clone().requires_grad_()
        first = torch.autograd.gradcheck(whole, (x,))
        y = function(x_RND[group.index])
        found[name] = y.detach(), first, _second(function, x_RND[group.index])
    return found


def _second(function: Function, x: torch.Tensor) -> bool:
    """Return whether a gradient of a gradient is that of the transpose of the transpose."""
    x = x.clone().requires_grad_()
    y = function(x)
    seed = torch.ones_like(y).requires_grad_()
    (back,) = torch.autograd.grad(y, x, seed, create_graph=True)
    (again,) = torch.autograd.grad(back, seed, x.detach())
    return torch.allclose(again, y)


def refused(context: RankContext, _: None) -> dict[str, str]:
    """Return what is said of every wrong argument."""
    x, api = torch.ones(3, 2), ec.collectives
    wrong: dict[str, Callable[[], object]] = {
        "rows": lambda: api.reduce_scatter(x),
        "parts": lambda: api.all_to_all(x),
        "scalar": lambda: api.all_gather(torch.ones(())),
        "one": lambda: api.all_to_all(x, send_rows=[1, 2]),
        "counts": lambda: api.all_to_all(x, send_rows=[3], receive_rows=[3]),
        "sum": lambda: api.all_to_all(x, send_rows=[1, 1], receive_rows=[1, 1]),
        "own": lambda: api.all_to_all(
            x, send_rows=[1, 2] if context.rank else [2, 1], receive_rows=[3, 3]
        ),
        "source": lambda: api.broadcast(x, 2),
        "root": lambda: api.reduce(x, -1),
        "algorithm": lambda: api.all_reduce(x, algorithm="star"),
        "nodes": lambda: api.all_reduce(x, algorithm="hierarchical", ranks_per_node=2),
        "unnamed": lambda: api.all_reduce(x, algorithm="hierarchical"),
        "tree": lambda: api.all_gather(x, algorithm="tree"),
        "useless slices": lambda: api.all_gather(x, ranks_per_node=2),
        "useless": lambda: api.all_reduce(x, ranks_per_node=2),
    }
    said: dict[str, str] = {}
    for name, call in wrong.items():
        try:
            call()
        except ConfigError as error:
            (problem,) = error.problems
            said[name] = problem.message
            said["rule"] = problem.rule
    return said
