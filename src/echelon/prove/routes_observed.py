"""Where the ranks sent the tokens of a global batch, put together: token by token, layer by layer.

Shape suffixes: B sequences of the global batch, T positions, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from echelon.prove.batches import global_batch
from echelon.prove.observed import Observed
from echelon.prove.routing_said import RouteSaid
from echelon.prove.told_routing import ToldLayer, ToldStep


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRoutes:
    """Hold where all ranks together sent the tokens through one layer.

    `times_BT` counts how often each token was routed, `rank_BT` is who did so last; `strangers` are
    the numbers of tokens that the batch does not have.
    """

    layer: ToldLayer
    times_BT: torch.Tensor
    rank_BT: torch.Tensor
    strangers: Sequence[int]

    @property
    def problem(self) -> str:
        """Return what is wrong with who routed what, or nothing: each token is routed once."""
        never, again = int((self.times_BT == 0).sum()), int((self.times_BT > 1).sum())
        if self.strangers:
            return f"token {self.strangers[0]} is routed, and the batch has no such token"
        if never:
            return f"{never} of {self.times_BT.numel()} tokens are routed by no rank"
        if again:
            return f"{again} of {self.times_BT.numel()} tokens are routed more than once"
        return ""


def says_routes(observed: Observed, step: int) -> bool:
    """Return whether any rank says where it sent tokens."""
    return any(report.routing is not None for report in observed.reports(step))


def routes_of(observed: Observed, step: int, layer: int) -> ObservedRoutes:
    """Return what the ranks did with all tokens of `step` in `layer`."""
    plan = observed.plan
    experts, length = plan.model.experts, plan.mathematics.sequence_length
    assert experts is not None, "only a layer with experts routes"
    rows = {sample: row for row, sample in enumerate(global_batch(plan, step).sample_ids)}
    times_BT = torch.zeros(len(rows), length, dtype=torch.int64)
    rank_BT = torch.zeros_like(times_BT)
    chosen_BTK = torch.zeros(*times_BT.shape, experts.top_k, dtype=torch.int64)
    kept_BTK = torch.zeros_like(chosen_BTK, dtype=torch.bool)
    strangers: list[int] = []
    for rank, route in _routes(observed, step, layer):
        for token, chosen, kept in zip(route.tokens, route.chosen, route.kept, strict=True):
            sample, position = divmod(token, length)
            if sample not in rows:
                strangers.append(token)
                continue
            place = rows[sample], position
            times_BT[place] += 1
            rank_BT[place] = rank
            chosen_BTK[place] = torch.tensor(chosen)
            kept_BTK[place] = torch.tensor(kept)
    return ObservedRoutes(
        layer=ToldLayer(chosen_BTK=chosen_BTK, kept_BTK=kept_BTK),
        times_BT=times_BT,
        rank_BT=rank_BT,
        strangers=strangers,
    )


def told_by(observed: Observed, num_steps: int) -> tuple[ToldStep, ...] | None:
    """Return where the ranks sent all tokens in all steps; None where they do not say it whole."""
    model = observed.plan.model
    layers = [layer for layer in range(model.layers) if model.layer_has_experts(layer)]
    told: list[ToldStep] = []
    for step in range(num_steps):
        if not layers or not says_routes(observed, step):
            return None
        routes = {layer: routes_of(observed, step, layer) for layer in layers}
        if any(one.problem for one in routes.values()):
            return None
        told.append({layer: one.layer for layer, one in routes.items()})
    return tuple(told)


def _routes(observed: Observed, step: int, layer: int) -> list[tuple[int, RouteSaid]]:
    return [
        (rank, route)
        for rank, report in enumerate(observed.reports(step))
        if report.routing is not None
        for route in report.routing.routes
        if route.layer == layer
    ]
