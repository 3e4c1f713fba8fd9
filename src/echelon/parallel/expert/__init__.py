"""Expert parallelism: routers, loads, and the way of tokens to experts and back."""

from __future__ import annotations

from echelon.parallel.expert.balance import Balancer, LayerLoad
from echelon.parallel.expert.layer import ExpertParallel, expert_parallel
from echelon.parallel.expert.router import Router

__all__ = ["Balancer", "ExpertParallel", "LayerLoad", "Router", "expert_parallel"]
