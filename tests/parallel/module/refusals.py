"""A module on one rank, and the error that a call raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from echelon.api.parallelizing import parallelize
from echelon.core.errors import EchelonError
from echelon.core.plan import Plan, Zero
from echelon.training.module.optimizer import ModuleOptimizer
from tests.parallel.layouts import plan_of
from tests.parallel.module.models import loss_of, make, tokens

PLAIN = plan_of()
STAGE_3 = plan_of(zero=Zero(stage=3))


def refusal(call: Callable[[], object]) -> EchelonError:
    """Return the error that a call raises."""
    with pytest.raises(EchelonError) as caught:
        call()
    return caught.value


def parallel(plan: Plan, **arguments: Any) -> tuple[nn.Module, ModuleOptimizer]:
    """Return a transformer on one rank."""
    return parallelize(make("transformer"), plan, **arguments)


def backward(model: nn.Module, step: int = 0) -> None:
    """Run one forward and backward."""
    loss_of(model, tokens(step, 0, 0)).backward()


def learned(plan: Plan) -> tuple[nn.Module, ModuleOptimizer]:
    """Return a transformer whose first step is over."""
    model, optimizer = parallel(plan)
    backward(model)
    optimizer.step()
    return model, optimizer
