# SPDX-License-Identifier: Apache-2.0
"""Stacks of experts in any module: each tensor rank has some of them, whole.

Split: dim 0 of every parameter of the module that holds the experts: E/n of them on each rank.
Sent:  a whole stream, which all ranks have and route alike: the sum of what their experts make of
       it; in backward the sums of its gradient and of that of the gates. A stream that is cut along
       the sequence: each row and its gate to the rank of its expert, and back (all-to-all).
Bytes: `module_expert_bytes` in `tests/parallel/module/sent_bytes.py`.
Must divide: n | E.
Source: Lepikhin et al., "GShard", 2020; Rajbhandari et al., "DeepSpeed-MoE", 2022, section 5.

The module is called as those of transformers are: with tokens [N, D], the numbers of the experts of
each [N, K], and their gates [N, K]; it gives [N, D]. Its own forward runs on the rows of its own
experts, one expert a row, numbered from 0.

Shape suffixes: N tokens of this rank, K experts of a token, R rows at the experts of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from echelon.core.errors import RunFailed
from echelon.core.rulebook.module import MODULE_TENSOR_SPLIT
from echelon.layout.modules import StackedExperts
from echelon.parallel.expert.router import TokenRouting
from echelon.parallel.expert.token_dispatcher import FlatTokenDispatcher
from echelon.parallel.transport.collectives import Group
from echelon.parallel.transport.rows import SUM_GRADIENT, SUM_ROWS, MoveRows


class SplitExperts:
    """The forward of a module with stacks of experts, of which this rank has some."""

    def __init__(self, module: nn.Module, experts: StackedExperts, group: Group) -> None:
        """Run the own forward of `module` on the rows of its experts here."""
        self._own: Callable[..., torch.Tensor] = module.forward
        self._stacks = list(module.parameters(recurse=False))
        self._experts, self._group = experts, group
        self._here = experts.num_experts // group.size

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return what the experts of all ranks make of each token, [..., D]."""
        call = _ExpertCall(self._experts.name, args, kwargs)
        compute = self._sent if self._experts.cut else self._summed
        y_ND = compute(call)
        return y_ND.view(*call.hidden.shape[:-1], y_ND.shape[-1])

    def _summed(self, call: _ExpertCall) -> torch.Tensor:
        """Return the sum over all ranks, each of which has all tokens."""
        group, name = self._group, self._experts.name
        x_ND: Any = MoveRows.apply(call.hidden_ND, group, f"{name}.tokens", SUM_GRADIENT)
        gates_NK: Any = MoveRows.apply(call.gates_NK, group, f"{name}.gates", SUM_GRADIENT)
        local_NK = call.chosen_NK - group.index * self._here
        token_R, place_R = ((local_NK >= 0) & (local_NK < self._here)).nonzero(as_tuple=True)
        y_RD = self._run(
            call, x_ND[token_R], local_NK[token_R, place_R], gates_NK[token_R, place_R]
        )
        y_ND = y_RD.new_zeros((len(x_ND), y_RD.shape[-1])).index_add(0, token_R, y_RD)
        total: torch.Tensor = MoveRows.apply(y_ND, group, name, SUM_ROWS)
        return total

    def _sent(self, call: _ExpertCall) -> torch.Tensor:
        """Return what comes back for the tokens of this rank."""
        name = self._experts.name
        routed = TokenRouting(gates_nK=call.gates_NK, chosen_nK=call.chosen_NK, kept_nK=None)
        dispatcher = FlatTokenDispatcher(routed, self._experts.num_experts, self._group)
        rows_RD, gates_R = _Dispatch.apply(call.hidden_ND, call.gates_NK, dispatcher, name)
        counts = torch.as_tensor(dispatcher.rows_by_expert, device=rows_RD.device)
        local_R = torch.arange(self._here, device=rows_RD.device).repeat_interleave(counts)
        y_RD = self._run(call, rows_RD, local_R, gates_R)
        y_ND: torch.Tensor = _Combine.apply(y_RD, dispatcher, name)
        return y_ND

    def _run(
        self,
        call: _ExpertCall,
        rows_RD: torch.Tensor,
        local_R: torch.Tensor,
        gates_R: torch.Tensor,
    ) -> torch.Tensor:
        """Return what the experts here make of rows; a gradient comes to each where none does."""
        if not len(rows_RD):
            nothing: torch.Tensor = _NoRows.apply(rows_RD, gates_R, *self._stacks)
            return nothing
        return call.run(self._own, rows_RD, local_R.unsqueeze(1), gates_R.unsqueeze(1))


class _ExpertCall:
    """One call of a module with experts: what of it are tokens, choices and gates."""

    def __init__(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._args, self._kwargs = args, dict(kwargs)
        given = {**dict(enumerate(args)), **kwargs}
        tensors = {key: one for key, one in given.items() if isinstance(one, torch.Tensor)}
        wide = [key for key, one in tensors.items() if one.is_floating_point()]
        whole = [key for key in tensors if key not in wide]
        fits = len(wide) == 2 and len(whole) == 1
        if not fits or tensors[wide[1]].shape != tensors[whole[0]].shape:
            told = ", ".join(f"{list(one.shape)} {one.dtype}" for one in tensors.values())
            raise RunFailed(
                MODULE_TENSOR_SPLIT.problem(
                    f"{name} is called with {told}, and experts take tokens [N, D], the numbers of "
                    "the experts of each [N, K] and their gates [N, K]",
                    key="tensor",
                    suggestions=(f"no rule for {name}: it stays whole on every rank",),
                )
            )
        self._places = (wide[0], whole[0], wide[1])
        self.hidden = tensors[wide[0]]
        self.hidden_ND = self.hidden.reshape(-1, self.hidden.shape[-1])
        chosen, gates = tensors[whole[0]], tensors[wide[1]]
        self.chosen_NK = chosen.reshape(-1, chosen.shape[-1])
        self.gates_NK = gates.reshape(-1, gates.shape[-1])

    def run(self, own: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        """Return what a forward gives for other tokens, choices and gates."""
        new = dict(zip(self._places, tensors, strict=True))
        args = [new.get(place, one) for place, one in enumerate(self._args)]
        return own(*args, **{key: new.get(key, one) for key, one in self._kwargs.items()})


class _Dispatch(torch.autograd.Function):
    """Rows and gates go to their experts; their gradients come back, and are added up."""

    @staticmethod
    def forward(
        ctx: Any, x_ND: torch.Tensor, gates_NK: torch.Tensor, by: FlatTokenDispatcher, name: str
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return rows_RD and gates_R."""
        ctx.by, ctx.name = by, name
        return by.dispatch(x_ND, gates_NK, name=f"{name}.dispatch")()

    @staticmethod
    def backward(
        ctx: Any, drows: torch.Tensor, dgates: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of tokens and gates."""
        name = f"{ctx.name}.dispatch.backward"
        back = ctx.by.combine(drows.contiguous(), dgates.contiguous(), name=name)
        return (*back(), None, None)


class _Combine(torch.autograd.Function):
    """Rows come back from their experts, and are added up; their gradients go there."""

    @staticmethod
    def forward(ctx: Any, y_RD: torch.Tensor, by: FlatTokenDispatcher, name: str) -> torch.Tensor:
        """Return y_ND."""
        ctx.by, ctx.name = by, name
        return by.combine(y_RD.contiguous(), None, name=f"{name}.combine")()[0]

    @staticmethod
    def backward(ctx: Any, dy_ND: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of each row."""
        there = ctx.by.dispatch(dy_ND.contiguous(), None, name=f"{ctx.name}.combine.backward")
        return there()[0], None, None


class _NoRows(torch.autograd.Function):
    """What experts make of no rows: their gradients are zero, and the others still get theirs."""

    @staticmethod
    def forward(
        ctx: Any, rows_0D: torch.Tensor, gates_0: torch.Tensor, *stacks: torch.Tensor
    ) -> torch.Tensor:
        """Return no rows."""
        ctx.stacks, ctx.gates = stacks, gates_0.shape
        return rows_0D.view_as(rows_0D)

    @staticmethod
    def backward(ctx: Any, dy_0D: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return zeros."""
        zeros = [
            one.new_zeros(one.shape) if need else None
            for one, need in zip(ctx.stacks, ctx.needs_input_grad[2:], strict=True)
        ]
        return dy_0D, dy_0D.new_zeros(ctx.gates), *zeros
