# SPDX-License-Identifier: Apache-2.0
"""Tokens whose router gives a number that is not finite, though what it reads is finite.

A router is no module that is called, and a sigmoid makes a finite score of an infinite logit, so
its logits are looked at themselves. What is not finite before a router is not its fault.

Shape suffixes: n tokens of this rank, D hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as fn

from echelon.models.precision import at_least_fp32
from echelon.parallel.expert.router import RoutedTokens, Router, TokenRouting
from echelon.parallel.operations import RankOperations

ReportRouter = Callable[[int, str], None]
"""Learn in which layer a router gave what is not finite, and for which tokens."""

_MOST_SAMPLES = 3  # samples in a message
_MOST_NUMBERS = 4  # of samples or positions in a message


def find_routers(stages: Iterable[nn.Module]) -> list[Router]:
    """Return the routers of the stages of a rank, each once."""
    operations = (stage.operations for stage in stages)
    found = (o.experts for o in operations if isinstance(o, RankOperations))
    return list({id(one.router): one.router for one in found if one is not None}.values())


def listen_to(router: Router, look: Callable[..., None]) -> None:
    """Show `look` what the router reads (but `train`), and what it returns, from now on."""
    route = router.route

    def listening(*read: Any, **options: Any) -> TokenRouting:
        routed = route(*read, **options)
        look(*read, routed)
        return routed

    router.route = listening


@contextmanager
def watching_routers(routers: Sequence[Router], report: ReportRouter) -> Iterator[None]:
    """Tell `report` of every layer whose router gives what is not finite."""
    before = [router.route for router in routers]

    def look(
        x_nD: torch.Tensor, weight_ED: nn.Parameter, layer: int, tokens: RoutedTokens, _: object
    ) -> None:
        bad_n = _not_finite(x_nD, weight_ED)
        if bool(bad_n.any()):
            report(layer, _describe_tokens(tokens, bad_n))

    for router in routers:
        listen_to(router, look)
    try:
        yield
    finally:
        for router, route in zip(routers, before, strict=True):
            router.route = route


@torch.no_grad()
def _not_finite(x_nD: torch.Tensor, weight_ED: torch.Tensor) -> torch.Tensor:
    """Return which rows are finite, and their logits are not."""
    wide = at_least_fp32(x_nD.dtype)
    logits_nE = fn.linear(x_nD.to(wide), weight_ED.to(wide))
    return x_nD.isfinite().all(-1) & ~logits_nE.isfinite().all(-1)


def _describe_tokens(tokens: RoutedTokens, bad_n: torch.Tensor) -> str:
    """Return how many tokens there are, and the first ones by sample and position."""
    numbers = sorted(tokens.number_n[bad_n].tolist())
    positions: dict[int, list[int]] = {}
    for number in numbers:
        sample, position = divmod(number, tokens.length)
        positions.setdefault(sample, []).append(position)
    samples = [
        f"sample {sample}, position{'s' * (len(at) > 1)} {first_few(at)}"
        for sample, at in list(positions.items())[:_MOST_SAMPLES]
    ]
    more = ["..."] if len(positions) > _MOST_SAMPLES else []
    count = f"{len(numbers)} of {len(bad_n)} tokens"
    return f"the logits of {count} ({'; '.join([*samples, *more])})"


def first_few(numbers: Sequence[int]) -> str:
    """Return the first numbers, and dots where there are more."""
    shown = ", ".join(map(str, numbers[:_MOST_NUMBERS]))
    return shown + (", ..." if len(numbers) > _MOST_NUMBERS else "")
