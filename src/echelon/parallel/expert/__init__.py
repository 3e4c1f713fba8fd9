# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism: routers, loads, and the way of tokens to experts and back.

layer               the mixture of experts of a block on one rank
router              where its tokens go
balance             loads over all ranks, and what follows from them
token_dispatcher    tokens sent straight to the ranks of their experts, across nodes once and then
                    within, or padded: as many rows to each
feed_forward        what experts compute; grouped_matmul: all of them in one launch
"""

from __future__ import annotations

from echelon.parallel.expert.balance import Balancer, LayerLoad
from echelon.parallel.expert.layer import ExpertParallel, expert_parallel
from echelon.parallel.expert.router import Router

__all__ = ["Balancer", "ExpertParallel", "LayerLoad", "Router", "expert_parallel"]
