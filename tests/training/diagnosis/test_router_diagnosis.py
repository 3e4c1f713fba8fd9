"""A router whose logits are not finite is told with its layer and its tokens; x may be at fault."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from echelon.parallel.expert.router import RoutedTokens, Router, TokenRouting
from echelon.training.diagnosis import find_routers, watching_routers

DONE = TokenRouting(
    gates_nK=torch.zeros(0), chosen_nK=torch.zeros(0, dtype=torch.int64), kept_nK=None
)


class Routes:
    """A router that only writes down in which layers it was asked."""

    def __init__(self) -> None:
        """Begin with none."""
        self.asked: list[int] = []

    def route(self, x_nD: Any, weight_ED: Any, layer: int, tokens: Any, *, train: bool) -> Any:
        """Note the layer."""
        self.asked.append(layer)
        return DONE


def told(
    x_nD: torch.Tensor, weight_ED: torch.Tensor, numbers: list[int] | None = None
) -> list[Any]:
    """Return what is told of a layer 5 whose tokens have these numbers, 10 to a sequence."""
    number_n = torch.tensor(range(len(x_nD)) if numbers is None else numbers)
    tokens = RoutedTokens(key_n=number_n, number_n=number_n, num_sequences=1, length=10)
    found: list[tuple[int, str]] = []
    router = Routes()
    before = router.route
    with watching_routers(
        [cast("Router", router)], lambda layer, says: found.append((layer, says))
    ):
        routed = router.route(x_nD, nn.Parameter(weight_ED), 5, tokens, train=True)
    assert routed is DONE
    assert router.asked == [5]
    assert router.route == before
    return found


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_logits_that_are_not_finite_are_told(value: float) -> None:
    # Only row 1 reads the second feature; 3e38 overflows where it is added up.
    x_nD = torch.tensor([[1.0, 0.0], [2.0, 2.0], [3.0, 0.0]])
    weight_ED = torch.tensor([[1.0, 0.0], [1.0, value]])
    found = told(x_nD, weight_ED, [12, 37, 3])
    if value == 3e38:
        assert found == [(5, "the logits of 1 of 3 tokens (sample 3, position 7)")]
    else:
        # 0 x NaN and 0 x infinity are no numbers either.
        says = "sample 0, position 3; sample 1, position 2; sample 3, position 7"
        assert found == [(5, f"the logits of 3 of 3 tokens ({says})")]


def test_a_token_that_comes_not_finite_is_not_the_fault_of_the_router() -> None:
    x_nD = torch.tensor([[1.0], [float("nan")]])
    assert told(x_nD, torch.ones(2, 1)) == []
    assert told(torch.ones(2, 1), torch.ones(2, 1)) == []


def test_logits_are_wide_as_they_are_in_the_router() -> None:
    # 240 x 300 is more than float16 holds.
    x_nD = torch.full((1, 1), 240.0, dtype=torch.float16)
    assert told(x_nD, torch.full((2, 1), 300.0, dtype=torch.float16)) == []


def test_few_of_many_tokens_are_named() -> None:
    weight_ED = torch.full((2, 1), float("inf"))
    (one,) = told(torch.ones(6, 1), weight_ED, [9, 0, 1, 5, 3, 2])
    assert one[1] == "the logits of 6 of 6 tokens (sample 0, positions 0, 1, 2, 3, ...)"
    (one,) = told(torch.ones(5, 1), weight_ED, [0, 10, 11, 20, 30])
    says = "sample 0, position 0; sample 1, positions 0, 1; sample 2, position 0; ..."
    assert one[1] == f"the logits of 5 of 5 tokens ({says})"


def test_routers_are_given_back_whatever_happens() -> None:
    router = Routes()
    before = router.route
    with pytest.raises(RuntimeError), watching_routers([cast("Router", router)], print):
        raise RuntimeError
    assert router.route == before


def test_other_operations_have_no_router() -> None:
    plain = cast("nn.Module", SimpleNamespace(operations=object()))
    assert find_routers([plain]) == []
