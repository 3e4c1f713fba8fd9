# SPDX-License-Identifier: Apache-2.0
"""Attention sinks: a learned score of each query head that takes its share of the softmax.

A sink is the score of a key whose value is 0. So of an output o and a log-sum-exp l of all keys it
makes l' = log(exp l + exp sink) and o' = o exp(l - l'), whatever kernel or ring gave o and l; and
as kernels compute weights again from l', their gradients of queries, keys and values are right as
they are. That of the sink is the sum over queries of -exp(sink - l') (dout . o'), for ds is
p (dp - delta) with dp = 0 (gpt-oss, 2025; Dao, "FlashAttention-2", 2023, section 2).

Shape suffixes: T queries, B sequences, H query heads that are attended to here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from echelon.models.precision import widened


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSinks:
    """Hold the sinks of the heads of a tensor rank, of which `heads` are attended to here.

    `add` takes the gradient of all of them, once for each forward pass: 0 for heads elsewhere.
    """

    weight: nn.Parameter
    add: Callable[[nn.Parameter, torch.Tensor], None]
    heads: slice

    @property
    def values_H(self) -> torch.Tensor:
        """Return the sinks of the heads here."""
        return self.weight.detach()[self.heads]

    def backward(
        self, dout_TBHd: torch.Tensor, out_TBHd: torch.Tensor, lse_BHT: torch.Tensor
    ) -> None:
        """Give on the gradient, from the output and the log-sum-exp with the sinks in them."""
        pull_TBH = (widened(dout_TBHd) * widened(out_TBHd)).sum(-1)
        shares_BHT = (widened(self.values_H)[:, None] - lse_BHT).exp()
        gradient_H = torch.einsum("bht,tbh->h", shares_BHT, pull_TBH.to(shares_BHT.dtype)).neg()
        whole_H = gradient_H.new_zeros(self.weight.shape)
        whole_H[self.heads] = gradient_H
        self.add(self.weight, whole_H)
