# SPDX-License-Identifier: Apache-2.0
"""The loss of one's own module: a sum, and a count; and token losses from logits, whole or split.

The mean of means is not the mean: microbatches and data ranks may count different numbers of
tokens. So a loss is two functions. The sum is of the module's output and a microbatch; the count is
of the microbatch alone, as the counts of all are added up before the first backward begins.

The sum of token losses makes no second table of the size of the logits.
`torch.nn.functional.cross_entropy` keeps the logarithm of every probability, and its backward makes
two more tables as large as the logits: one of zeros but for the labels, and the gradient. Here one
number of each row is kept, and the gradient is all that is made. Both passes go over pieces of the
rows that stay in cache, and compute each in at least float32.

Where tensor ranks have columns of the head:

Split: the vocabulary, as the head is: logits [B, T, V/n] of each rank.
Sent:  three numbers for each token (all-gather), instead of all logits.
Bytes: `module_tensor_bytes` in `tests/parallel/module/sent_bytes.py`, with `loss_bytes`.
Must divide: nothing; columns of padding do not count.
Source: Shoeybi et al., "Megatron-LM", 2019, section 3.

What a module does with its logits before it gives them is its own: scales, a soft cap, another
dtype. Such work on each number alone is done on the columns of a rank. Before anything else, which
would see too few columns, they are gathered as ever, and from then on at once. What there is to see
is seen in the first forward of each kind (training or not, with gradients or without).

Shape suffixes: N tokens, V vocabulary, or columns of this rank with padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from echelon.core.errors import ConfigError
from echelon.core.piece_sizes import TRAINING_PIECES
from echelon.core.rulebook.module import MODULE_LOSS
from echelon.models.precision import at_least_fp32
from echelon.parallel.kernels.cross_entropy import (
    LabelRows,
    RowStatistics,
    overwrite_with_gradient,
    row_statistics,
)
from echelon.parallel.kernels.low_precision import row_chunks
from echelon.parallel.module.forwards.own_forward import is_transformed
from echelon.parallel.module.tensor.layers import SplitLinear, TensorLink
from echelon.parallel.transport.collectives import Group
from echelon.parallel.vocabulary import local_ids

Batch: TypeAlias = Mapping[str, Any]
"""Named tensors whose first dim is samples; what is no tensor is given to the module as it is."""

IGNORED = -100
"""The label of a token that does not count, as in PyTorch."""

LABELS = "labels"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleLoss:
    """Say what of a microbatch is added up, and what the sum over all microbatches is divided by.

    What `targets` names is for the loss, and is not given to the module. `prepare` is done to the
    global batch before anything is cut, where samples and sequences are whole. Each forward of the
    module is inside of `around`.
    """

    sum_of: Callable[[Any, Batch], torch.Tensor]
    count_of: Callable[[Batch], int]
    targets: tuple[str, ...] = (LABELS,)
    prepare: Callable[[Batch], Batch] = dict
    around: Callable[[], AbstractContextManager[object]] = nullcontext

    def inputs(self, batch: Batch) -> dict[str, Any]:
        """Return what the module is called with."""
        return {name: value for name, value in batch.items() if name not in self.targets}


LossChoice: TypeAlias = (
    Literal["causal"]
    | ModuleLoss
    | tuple[Callable[[Any, Batch], torch.Tensor], Callable[[Batch], int]]
)
"""What a caller may give for a loss."""


def loss_of(choice: LossChoice) -> ModuleLoss:
    """Return the loss that is meant; ConfigError where it is none."""
    if isinstance(choice, ModuleLoss):
        return choice
    if choice == "causal":
        return CAUSAL
    if isinstance(choice, tuple) and len(choice) == 2 and all(map(callable, choice)):
        return ModuleLoss(sum_of=choice[0], count_of=choice[1])
    raise ConfigError(
        MODULE_LOSS.problem(
            f"loss = {choice!r}", key="loss", suggestions=("loss='causal'", "loss=(sum, count)")
        )
    )


def causal_sum(output: Any, batch: Batch) -> torch.Tensor:
    """Return the sum of token losses; logits are [B, T, V], prepared labels [B, T].

    Logits are the output, or its `logits`; a loss is computed in float32 from narrower ones, as in
    `transformers`.
    """
    logits: torch.Tensor = output if isinstance(output, torch.Tensor) else output.logits
    labels: torch.Tensor = batch[LABELS]
    return token_loss_sum(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), ignored=IGNORED)


def causal_count(batch: Batch) -> int:
    """Return how many tokens are predicted and count, by prepared labels."""
    return int((batch[LABELS] != IGNORED).sum())


def next_labels(batch: Batch) -> Batch:
    """Return the batch with labels [B, T] of the token after each; there is none after the last."""
    if LABELS not in batch:
        raise ConfigError(
            MODULE_LOSS.problem(
                f"the batch has {', '.join(map(repr, batch))} and no {LABELS!r}",
                key="loss",
                suggestions=("batch['labels'] = batch['input_ids']",),
            )
        )
    labels: torch.Tensor = batch[LABELS]
    return {**batch, LABELS: functional.pad(labels[:, 1:], (0, 1), value=IGNORED)}


CAUSAL = ModuleLoss(sum_of=causal_sum, count_of=causal_count, prepare=next_labels)
"""The loss of a language model."""


class TokenLossSum(torch.autograd.Function):
    """Add up -log softmax(logits)[label] over the rows whose label is not `ignored`."""

    @staticmethod
    def forward(
        ctx: Any, logits_NV: torch.Tensor, labels_N: torch.Tensor, ignored: int
    ) -> torch.Tensor:
        """Return the sum, in at least float32; keep the logits, and two numbers of each row."""
        counted_N = labels_N != ignored
        local_N1 = torch.where(counted_N, labels_N, 0).unsqueeze(1)
        wide = at_least_fp32(logits_NV.dtype)
        maxima_N1 = logits_NV.amax(1, keepdim=True).to(wide)
        totals_N1 = torch.empty_like(maxima_N1)
        for rows in row_chunks(logits_NV):
            piece = torch.sub(logits_NV[rows], maxima_N1[rows]).exp_()
            torch.sum(piece, dim=1, keepdim=True, out=totals_N1[rows])
        losses_N1 = totals_N1.log() + maxima_N1 - logits_NV.gather(1, local_N1)
        ctx.save_for_backward(logits_NV, local_N1, counted_N, maxima_N1, totals_N1)
        return losses_N1.squeeze(1).masked_fill(~counted_N, 0.0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return factor x (softmax - one-hot) of the rows that count, and zero of the others."""
        logits_NV, local_N1, counted_N, maxima_N1, totals_N1 = ctx.saved_tensors
        factors_N1 = torch.where(counted_N, factor, 0.0).to(maxima_N1.dtype).unsqueeze(1)
        shares_N1 = factors_N1 / totals_N1
        gradient_NV = torch.empty_like(logits_NV)
        widens = maxima_N1.dtype != logits_NV.dtype
        for rows in row_chunks(logits_NV):
            into = None if widens else gradient_NV[rows]
            piece = torch.sub(logits_NV[rows], maxima_N1[rows], out=into)
            piece.exp_().mul_(shares_N1[rows]).scatter_add_(1, local_N1[rows], -factors_N1[rows])
            if widens:
                gradient_NV[rows] = piece
        return gradient_NV, None, None


def token_loss_sum(
    logits_NV: torch.Tensor, labels_N: torch.Tensor, *, ignored: int
) -> torch.Tensor:
    """Return the sum of the losses of tokens whose label is not `ignored`."""
    if is_transformed():
        wide_NV = logits_NV.to(at_least_fp32(logits_NV.dtype))
        return functional.cross_entropy(wide_NV, labels_N, ignore_index=ignored, reduction="sum")
    total: Any = TokenLossSum.apply(logits_NV, labels_N, ignored)
    return total


_EACH = frozenset(
    [
        *("float", "double", "half", "bfloat16", "contiguous", "clone", "detach"),
        *("tanh", "tanh_", "neg", "__neg__"),
        *("mul", "mul_", "__mul__", "__rmul__", "__imul__"),
        *("div", "div_", "true_divide", "__truediv__", "__itruediv__"),
    ]
)
"""Functions of each number by itself, where what else they take are single numbers."""

_ASKS = frozenset(
    [
        *("dtype", "device", "ndim", "layout", "requires_grad", "grad_fn", "is_leaf"),
        *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested"),
        *("dim", "is_floating_point", "is_contiguous", "register_hook", "retain_grad"),
    ]
)
"""Functions and properties that read no number and no size, or wait for a gradient."""


def over_vocabulary(loss: ModuleLoss, link: TensorLink) -> ModuleLoss:
    """Return a loss that needs no whole logits, where it is the causal one and a head is split."""
    if loss.sum_of is not causal_sum or len(link.heads) != 1:
        return loss
    split = SplitCausalLoss(link.heads[0], link.group)
    return replace(loss, sum_of=split.sum_of, around=split.around)


class SplitCausalLoss:
    """Have a head keep its columns in our steps, and add up losses from them."""

    def __init__(self, head: SplitLinear, group: Group) -> None:
        """Take the logits of `head`, whose rows `group` shares out."""
        self._head, self._group = head, group
        self.keeps: dict[tuple[bool, bool], bool] = {}
        """Whether columns come out of the module as they are, by the kind of forward."""

    @contextmanager
    def around(self) -> Iterator[None]:
        """Let the head keep its columns in a forward inside."""
        head, kind = self._head, (self._head.module.training, torch.is_grad_enabled())
        known = self.keeps.get(kind)
        if known is False:
            yield
            return
        watch = _Watch(head)
        head.keeps = watch.note
        try:
            if known is None:
                with watch:
                    yield
            else:
                yield
        finally:
            head.keeps = None
        if known is None and watch.was_given:
            self.keeps[kind] = not watch.gathered

    def sum_of(self, output: Any, batch: Batch) -> torch.Tensor:
        """Return the sum of token losses; logits are [B, T, V/n] or, where gathered, [B, T, V]."""
        logits: torch.Tensor = output if isinstance(output, torch.Tensor) else output.logits
        if logits.shape[-1] == self._head.whole_outputs:
            return causal_sum(output, batch)
        labels: torch.Tensor = batch[LABELS]
        total: torch.Tensor = SplitCrossEntropy.apply(
            logits.reshape(-1, logits.shape[-1]),
            labels.reshape(-1),
            self._head.whole_outputs,
            self._group,
        )
        return total


class _Watch(TorchFunctionMode):
    """See what is done with the columns of a head, and gather them where more are needed."""

    def __init__(self, head: SplitLinear) -> None:
        super().__init__()
        self._head = head
        self._held: dict[int, torch.Tensor] = {}
        self.was_given = self.gathered = False

    def note(self, y: torch.Tensor) -> None:
        """Learn of the columns that a head gives."""
        self.was_given = True
        self._held[id(y)] = y

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function: on columns, or on all of them."""
        named = dict(kwargs or {})
        given = [one for one in tree_leaves((args, named)) if isinstance(one, torch.Tensor)]
        columns = [one for one in given if id(one) in self._held]
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        if not columns or name in _ASKS:
            return func(*args, **named)
        alone = all(one is columns[0] or not one.dim() for one in given)
        if alone and (name in _EACH or (name == "to" and not _moves(args, named))):
            return self._kept(func(*args, **named))
        if name == "__getitem__" and _leaves_columns(args[1], columns[0].dim()):
            return self._kept(func(*args, **named))
        self.gathered = True
        args, named = tree_map(self._whole, (args, named))
        return func(*args, **named)

    def _kept(self, y: torch.Tensor) -> torch.Tensor:
        self._held[id(y)] = y
        return y

    def _whole(self, one: Any) -> Any:
        held = isinstance(one, torch.Tensor) and id(one) in self._held
        return self._head.gathered(one) if held else one


def _moves(args: Any, named: Mapping[str, Any]) -> bool:
    """Return whether a call of `to` takes a tensor as its pattern."""
    return any(isinstance(one, torch.Tensor) for one in (*args[1:], *named.values()))


def _leaves_columns(index: Any, num_dims: int) -> bool:
    """Return whether an index of logits [..., V] leaves the last of `num_dims` as it is."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(one, slice | int) or one is Ellipsis for one in parts):
        return False
    last = parts[-1] if parts else Ellipsis
    if last == slice(None):
        return True
    if last is not Ellipsis and Ellipsis in parts:
        return False
    return len(parts) - (Ellipsis in parts) < num_dims


class SplitCrossEntropy(torch.autograd.Function):
    """The sum of the cross-entropies of tokens, over columns of all tensor ranks."""

    @staticmethod
    def forward(
        ctx: Any, logits_NV: torch.Tensor, labels_N: torch.Tensor, vocab: int, group: Group
    ) -> torch.Tensor:
        """Return the sum over labels that count, the same on every rank."""
        own_NV = logits_NV.detach().clone(memory_format=torch.contiguous_format)
        local_vocab = own_NV.shape[1]
        real = max(0, min(local_vocab, vocab - group.index * local_vocab))
        own_NV[:, real:] = float("-inf")
        counted_N = labels_N != IGNORED
        local_N, elsewhere_N = local_ids(labels_N.clamp(min=0), local_vocab, group)
        labels = LabelRows(local_C=local_N, mine_C=counted_N & ~elsewhere_N, counted_C=counted_N)
        local = row_statistics(own_NV, local_N, TRAINING_PIECES)
        local[2].masked_fill_(~labels.mine_C, 0.0)
        every = local.new_empty((group.size, *local.shape))
        group.all_gather(every.view(-1, local.shape[-1]), local, name="loss.statistics").wait()
        maximum_N = every[:, 0].amax(0)
        statistics = RowStatistics(
            maximum_C=maximum_N,
            total_C=(every[:, 1] * (every[:, 0] - maximum_N).exp()).sum(0),
            target_C=every[:, 2].sum(0),
            local_maximum_C=local[0],
        )
        ctx.own, ctx.statistics, ctx.labels = own_NV, statistics, labels
        losses_N = statistics.log_sum_C - statistics.target_C
        return torch.where(counted_N, losses_N, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return dloss x (softmax - one-hot) of the columns of this rank."""
        labels: LabelRows = ctx.labels
        own_NV, ctx.own = ctx.own, None
        assert own_NV is not None, "logits have become their gradient: one backward"
        factor_N = labels.counted_C * dloss
        left_N = overwrite_with_gradient(own_NV, ctx.statistics, labels, factor_N, TRAINING_PIECES)
        if left_N is not None:
            own_NV.mul_(left_N.unsqueeze(1))
        return own_NV, None, None, None
