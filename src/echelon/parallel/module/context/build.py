# SPDX-License-Identifier: Apache-2.0
"""The sequences of a module, cut over context ranks: the order of that, and who has which.

see the attention of the whole module -> replace it -> compare the cut module with the whole one.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from echelon.core.axis import Axis
from echelon.core.errors import ConfigError
from echelon.core.plan import Plan
from echelon.core.rulebook.module import MODULE_ATTENTION, MODULE_BATCH
from echelon.parallel.device_mesh import RankGroups
from echelon.parallel.module.context.attention import CutAttention, SeenAttention, SeenCall
from echelon.parallel.module.loss import Batch, ModuleLoss
from echelon.parallel.module.pipeline.chain import BlockCall, BlockChain, leaving_no_trace
from echelon.parallel.module.pipeline.stage import StageEnds, Window
from echelon.parallel.module.tensor.ranks import same_sums, sums_of
from echelon.parallel.storage.gradients import GradientStore, Reduction

_PRECISION = 0.6
"""Outputs differ by less than the spacing of numbers to this power, of the largest of them."""

POSITIONS, PADDING = "position_ids", "attention_mask"


class ModuleContext:
    """Run a module, or a stage of it, over the positions of this rank.

    `before` are the numbers of calls of attention before each block, and of all of them.
    """

    def __init__(
        self,
        model: nn.Module,
        cut: SequenceCut,
        mode: CutAttention,
        calls: Sequence[SeenCall],
        before: Sequence[int] = (),
    ) -> None:
        """Replace the calls of attention that were seen."""
        self._model, self.cut, self._mode = model, cut, mode
        self.calls, self._before = calls, before

    def __call__(self, **inputs: Any) -> Any:
        """Return what the module gives for this rank's positions."""
        self._mode.begin()
        with self._mode:
            output = self._model(**inputs)
        self._mode.end(len(self.calls))
        return output

    @contextmanager
    def stage(self, window: Window) -> Iterator[None]:
        """Replace attention in one forward of a stage."""
        self._mode.begin(self._before[window.start])
        with self._mode:
            try:
                yield
            except StageEnds:
                self._mode.end(self._before[window.stop])
                raise
        self._mode.end(self._before[window.stop])

    def give_time_to(self, store: GradientStore) -> None:
        """Let work of a store be done in the time of transfers."""
        self._mode.give_time_to(store)


def apply_context(
    model: nn.Module,
    plan: Plan,
    groups: RankGroups,
    *,
    loss: ModuleLoss,
    example: Batch,
    chain: BlockChain | None = None,
) -> ModuleContext:
    """Cut the sequences of a module; ConfigError where its outputs are not those of the whole.

    All ranks do so together, with a whole module of the same values, whose blocks are called by
    `chain` where there is one; `example` is a microbatch of the plan's length.
    """
    cut = SequenceCut(plan, model, plan.mesh.coordinates(groups.rank)[Axis.CP])
    device = next(model.parameters()).device
    prepared = loss.prepare(
        {n: o.to(device) if isinstance(o, torch.Tensor) else o for n, o in example.items()}
    )
    seen = SeenAttention()
    counter = _CallCounter(seen)
    handled = nullcontext() if chain is None else chain.handled_by(counter)
    with leaving_no_trace(model), torch.no_grad():
        with seen, handled:
            expected = _tensors(model(**loss.inputs(cut.whole(prepared))))
        buffers = _buffers(model)
    _check_calls(plan, seen.calls, counter, staged=chain is not None)
    mode = CutAttention(plan, groups, GradientStore(Reduction()), seen.calls)
    before = [*counter.before, len(seen.calls)]
    context = ModuleContext(model, cut, mode, seen.calls, before)
    with leaving_no_trace(model), torch.no_grad():
        with nullcontext() if chain is None else chain.handled_by(counter):
            found = _tensors(context(**loss.inputs(cut.cut(prepared))))
        after = _buffers(model)
    _check_outputs(plan, groups, found, [cut.rows(one) for one in expected], expected[0])
    _check_buffers(groups, buffers, after)
    return context


Sums = tuple[float, float, float]
"""What is compared of a tensor that may be large."""


def _check_outputs(
    plan: Plan,
    groups: RankGroups,
    found: Sequence[torch.Tensor],
    rows: Sequence[torch.Tensor],
    whole: torch.Tensor,
) -> None:
    """ConfigError on every rank unless the cut module gives the rows of the whole one."""
    mine = (_difference(found, rows), sums_of(whole))
    told: list[tuple[str, Sums]] = groups.world.gather_objects(mine)
    # What one rank finds ends all of them: another one may have rows that are right.
    for rank, (said, sums) in enumerate(told):
        if said:
            raise _unfit(
                f"the outputs of rank {rank} are not those of the whole module: {said}. Something "
                "besides attention depends on other positions, or on their number"
            )
        first = plan.mesh.group(rank, Axis.CP)[0]
        if not same_sums([told[first][1], sums]):
            raise _unfit(
                f"the module is not the same on ranks {first} and {rank}, which compute one batch "
                "together: its forward depends on the rank"
            )


def _buffers(model: nn.Module) -> dict[str, Sums]:
    return {name: sums_of(one) for name, one in model.named_buffers() if not one.is_meta}


def _check_buffers(groups: RankGroups, whole: Mapping[str, Sums], cut: Mapping[str, Sums]) -> None:
    """ConfigError on every rank for a buffer that is made of some positions only."""
    wrong = [name for name, one in whole.items() if not same_sums([one, cut.get(name)])]
    for rank, names in enumerate(groups.world.gather_objects(wrong)):
        if names:
            raise _unfit(
                f"the buffer {names[0]} becomes another on rank {rank} than in the whole module: "
                "it is made of positions, of which each rank has some"
            )


class _CallCounter:
    """Run blocks, and count the calls of attention before each."""

    def __init__(self, seen: SeenAttention) -> None:
        self._seen = seen
        self.before: list[int] = []
        self.after = 0

    def call(self, index: int, call: BlockCall) -> Any:
        """Run a block."""
        if index == len(self.before):
            self.before.append(len(self._seen.calls))
        output = call.run()
        self.after = len(self._seen.calls)
        return output


def _check_calls(
    plan: Plan, calls: Sequence[SeenCall], counter: _CallCounter, *, staged: bool
) -> None:
    """ConfigError where attention is not seen, not shared out by heads, or of no block."""
    if not calls:
        raise _unfit("the module makes no call of scaled_dot_product_attention")
    degree = plan.layout.context.ulysses_degree
    if odd := [one for one in calls if one.heads % degree]:
        raise _unfit(f"{odd[0].heads} heads are not shared out over {degree} ranks")
    if staged and (counter.before[0] or counter.after < len(calls)):
        raise _unfit("attention is called outside of the blocks, which no stage has")


def _tensors(output: Any) -> list[torch.Tensor]:
    """Return the first tensor of an output that has positions."""
    leaves = tree_flatten(output)[0]
    found = [one for one in leaves if isinstance(one, torch.Tensor) and one.dim() > 1]
    if not found:
        raise _unfit("the module gives no tensor [B, T, ...]")
    return found[:1]


def _difference(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> str:
    for one, other in zip(found, expected, strict=True):
        if one.shape != other.shape:
            return f"{tuple(one.shape)}, not {tuple(other.shape)}"
        limit = torch.finfo(other.dtype).eps ** _PRECISION * float(other.abs().max())
        if not (worst := float((one - other).abs().max())) <= limit:
            return f"they differ by {worst:.3g}"
    return ""


def _unfit(why: str) -> ConfigError:
    return ConfigError(
        MODULE_ATTENTION.problem(
            why, key="mesh.cp", suggestions=('attn_implementation="sdpa"', "mesh.cp = 1")
        )
    )


class SequenceCut:
    """Cut the sequences of a prepared batch: labels are those of the next tokens already."""

    def __init__(self, plan: Plan, model: nn.Module, cp_rank: int) -> None:
        """Take the positions of context rank `cp_rank`."""
        self._length = plan.mathematics.sequence_length
        self._mine = torch.tensor(plan.placement.positions(cp_rank))
        takes = inspect.signature(model.forward).parameters
        self._tells = {name for name in (POSITIONS, PADDING) if name in takes}

    def whole(self, batch: Batch) -> dict[str, Any]:
        """Return a batch as the module is given it without a cut.

        ConfigError where a sequence has padding, positions of its own, or another length.
        """
        given = dict(batch)
        padding = given.pop(PADDING, None)
        positions = given.pop(POSITIONS, None)
        if padding is not None and not bool((padding != 0).all()):
            raise _unfit_batch(f"{PADDING} hides tokens")
        if positions is not None and not bool((positions == torch.arange(self._length)).all()):
            raise _unfit_batch(f"{POSITIONS} are not 0 to {self._length - 1}")
        tensors = [one for one in given.values() if isinstance(one, torch.Tensor) and one.dim() > 1]
        if not any(one.shape[1] == self._length for one in tensors):
            shapes = ", ".join(str(tuple(one.shape)) for one in tensors)
            raise ConfigError(
                MODULE_BATCH.problem(
                    f"the plan cuts sequences of {self._length} positions, not {shapes}",
                    key="batch.sequence_length",
                )
            )
        if any(self._length in one.shape[2:] for one in tensors):
            raise _unfit_batch("a tensor of the batch has positions beyond its second dim")
        return given

    def cut(self, batch: Batch) -> dict[str, Any]:
        """Return this rank's positions of a batch, and tell the module which these are."""
        given = self.whole(batch)
        mine: dict[str, Any] = {}
        rows = 0
        for name, one in given.items():
            cut = isinstance(one, torch.Tensor) and one.dim() > 1 and one.shape[1] == self._length
            mine[name] = one[:, self._mine.to(one.device)] if cut else one
            rows = max(rows, len(one)) if cut else rows
        like = next(one for one in given.values() if isinstance(one, torch.Tensor))
        places = self._mine.to(like.device).expand(rows, -1)
        if POSITIONS in self._tells:
            mine[POSITIONS] = places
        if PADDING in self._tells:
            # Without it, transformers takes jumps of positions for several documents.
            mine[PADDING] = torch.ones_like(places)
        return mine

    def rows(self, output: torch.Tensor) -> torch.Tensor:
        """Return this rank's positions of an output [B, T, ...] of the whole module."""
        return output[:, self._mine.to(output.device)]


def _unfit_batch(why: str) -> ConfigError:
    return ConfigError(MODULE_ATTENTION.problem(why, key="mesh.cp", suggestions=("mesh.cp = 1",)))
