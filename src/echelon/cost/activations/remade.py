# SPDX-License-Identifier: Apache-2.0
"""What a block keeps where operators of it are made again in backward, and what that works with.

Such an operator keeps its input. Its output, and what its backward needs, are there again from the
backward of the linear layer that reads the output (`parallel/recompute.py`) to its own:

    norm         drops its output and statistics       n D s + n w   made by the first layer
    activation   drops its output                      N F s         made by the last layer
    mlp          drops gate and up, and the same       N (up + 1) F s
    attention    drops turned queries and keys, the output and its log-sum-exp, and over context
                 ranks all keys; keeps the projections side by side, N (H + 2 K) h s

Where the MLP is made again, so is its norm, in one go.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022,
section 5, for the operators of `parallel/`.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

from echelon.cost.activations.attention import ATTENTION, attention_branch
from echelon.cost.activations.linear import (
    ATTENTION_IN,
    DOWN,
    MLP_IN,
    POST_NORMS,
    ResidualBranch,
    mlp_branch,
)
from echelon.cost.activations.numbers import ActivationNumbers, Num, elementwise_max, holds
from echelon.cost.activations.operator_memory import OperatorMemory, SavedTensor, total_saved_bytes

_NORMS = {"attention norm": ("q, k, v", "q_down, kv_down"), "mlp norm": ("gate, up",)}
"""The first layers that read each norm, by its name."""

_LAST = {"attention norm": "o", "mlp norm": DOWN}
"""Until the last layer of a branch has run, what its first layers read is a variable."""


def remade_operators(
    x: ActivationNumbers, operators: Sequence[OperatorMemory], names: Set[str]
) -> tuple[OperatorMemory, ...]:
    """Return the operators of a block of which those called `names` are made again."""
    found = {one.name: one for one in operators}
    if "attention" in names and "heads" in found:
        _attention(x.of_attention, found)
    if "mlp" in names and DOWN in found:
        _mlp(x, found)
    elif "activation" in names and DOWN in found:
        _drop(found, DOWN, found[DOWN].saved, DOWN)
        _made_whole(found, DOWN, x.product_bytes(x.tokens * x.inner))
    if "norm" in names:
        # What two branches read is not made again.
        if "attention norm" in found and not holds(x.one_norm):
            _norm(x.of_attention, found, "attention norm", attention_branch(x))
        if DOWN in found and "mlp norm" in found:
            _norm(x, found, "mlp norm", mlp_branch(x))
    return tuple(found.values())


def _drop(
    found: dict[str, OperatorMemory], name: str, dropped: tuple[SavedTensor, ...], reader: str
) -> None:
    """Let `reader` make again what an operator kept."""
    one = found[name]
    kept = tuple(saved for saved in one.saved if saved not in dropped)
    found[name] = replace(one, saved=kept, remade=(*one.remade, *dropped), reader=reader)


def _made_whole(found: dict[str, OperatorMemory], name: str, size: Num) -> None:
    """Say that what was dropped last is made again whether its reader learns from it or not."""
    *others, last = found[name].remade
    found[name] = replace(found[name], remade=(*others, replace(last, bytes=size)))


def _attention(x: ActivationNumbers, found: dict[str, OperatorMemory]) -> None:
    """Keep the projections of attention alone; the gradient of its output lives as it does."""
    _drop(found, "heads", found["heads"].saved[1:], "o")
    _drop(found, ATTENTION, found[ATTENTION].saved, "o")
    _drop(found, "o", found["o"].saved, "o")
    heads, core, output = found["heads"], found[ATTENTION], found["o"]
    work = elementwise_max(
        heads.forward - heads.saved_bytes, total_saved_bytes(heads.remade) + core.forward
    )
    found["heads"] = replace(
        heads, backward=heads.backward + x.queries, backward_split=heads.backward_split + x.queries
    )
    found["o"] = replace(
        output,
        forward=x.queries + x.summed_bytes(x.whole),
        again=x.around + x.apart * x.stream + work,
    )


def _mlp(x: ActivationNumbers, found: dict[str, OperatorMemory]) -> None:
    """Keep the input of an MLP alone; the gradient of what is inside of it lives as it does."""
    _drop(found, DOWN, found[DOWN].saved, DOWN)
    _made_whole(found, DOWN, x.product_bytes(x.tokens * x.inner))
    _drop(found, "activation", found["activation"].saved, DOWN)
    inner, branch = x.tokens * x.inner * x.size, mlp_branch(x)
    columns, activation, down = found["gate, up"], found["activation"], found[DOWN]
    work = elementwise_max(columns.forward - columns.saved_bytes, activation.forward) - branch.local
    found["gate, up"] = replace(
        columns, backward=columns.backward + inner, backward_split=columns.backward_split + inner
    )
    found[DOWN] = replace(down, again=(1 + x.apart) * x.stream + work)


def _norm(
    x: ActivationNumbers, found: dict[str, OperatorMemory], name: str, branch: ResidualBranch
) -> None:
    """Keep the input of a norm alone; what it makes is a variable of the forward pass."""
    norm, last = found[name], found[_LAST[name]]
    (first,) = (one for one in _NORMS[name] if one in found)
    made: Num = found[first].forward - x.stream - x.gathered_bytes(x.whole) - branch.local
    statistics = norm.saved[-1]
    work = norm.forward - branch.local - x.stream * (len(norm.saved) - 1)
    reader = DOWN if found.get("activation", norm).remade and name == "mlp norm" else first
    if reader == first:
        beside = x.stream + branch.row_layer_bytes(x) + made
        found[first] = replace(found[first], again=beside + work)
    else:
        # Norm and layer are made again one after the other, the statistics kept.
        again = elementwise_max(last.again + statistics.bytes + x.stream, x.stream + work)
        found[last.name] = replace(last, again=again)
    _drop(found, first, found[first].saved[:1], reader)
    _made_whole(found, first, x.matmul_stream)
    _drop(found, name, (statistics,), reader)
    after = list(found)
    until = after.index(last.name) + 1
    until += after[until : until + 1] in ([name] for name in POST_NORMS)
    for one in after[after.index(first) + 1 : until]:
        # Where no layer keeps it, it is one anyway.
        beside = x.learns(branch.groups[0]) * x.stream
        found[one] = replace(found[one], forward=found[one].forward + beside)


def with_frozen_inputs(
    x: ActivationNumbers, operators: tuple[OperatorMemory, ...], *, mlp_again: bool
) -> tuple[OperatorMemory, ...]:
    """Return the operators of a block, where what no layer keeps is a variable that lives on.

    What attention reads lives until the MLP has an input of its own, that until the block is over.
    Without a norm the former is the input of the block, which its caller has. `mlp_again`: an MLP
    that is made again from its input keeps that.
    """
    lost = [(1 - x.learns(group)) * x.stream for group in (ATTENTION_IN, MLP_IN)]
    lost[1] = (1 - x.one_norm * x.learns(ATTENTION_IN)) * lost[1]
    if mlp_again:
        operators = tuple(
            replace(one, saved=(_more(one.saved[0], lost[1]),)) if one.name == "gate, up" else one
            for one in operators
        )
        lost[1] = 0 * x.stream
    beside, found = 0 * x.stream, list[OperatorMemory]()
    for one in operators:
        if one.name == "gate, up":
            beside = (1 - x.norm_before) * lost[0]
        found.append(replace(one, forward=one.forward + beside))
        if one.name == "q, k, v":
            beside = lost[0]
        elif one.name == "gate, up":
            beside = beside + lost[1]
    return tuple(found)


def _more(saved: SavedTensor, size: Num) -> SavedTensor:
    return replace(saved, bytes=saved.bytes + size)
