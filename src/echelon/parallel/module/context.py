# SPDX-License-Identifier: Apache-2.0
"""Context parallelism for any module that calls `scaled_dot_product_attention`.

see the attention of the whole module -> replace it -> compare the cut module with the whole one.

Split: the positions of every sequence, as in `parallel/context`.
Sent:  as in `parallel/context`: keys and values around a ring or gathered, or heads for positions.
Bytes: `module_context_bytes` in `tests/parallel/module/sent_bytes.py`.
Must divide: cp | sequence_length (2 ring_degree under zigzag); ulysses_degree | heads.
Source: Liu et al., "Ring Attention", 2023; Jacobs et al., "DeepSpeed-Ulysses", 2023.

Shape suffixes: B sequences, H query and K key/value heads, T positions, D head_dim.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from echelon.core.attention_mask import AttentionMask, Placement
from echelon.core.axis import Axis
from echelon.core.choices.registry import load_reference
from echelon.core.errors import ConfigError, RunFailed
from echelon.core.piece_sizes import TRAINING_PIECES
from echelon.core.plan import Plan
from echelon.core.rulebook.module import MODULE_ATTENTION, MODULE_BATCH
from echelon.models.attention.local import AttentionRule, LocalAttention, takes_any_band
from echelon.parallel.context.attention import RingContext
from echelon.parallel.context.ulysses import HeadsToPositions, PositionsToHeads
from echelon.parallel.device_mesh import RankGroups
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
            raise _cannot_cut(
                f"the outputs of rank {rank} are not those of the whole module: {said}. Something "
                "besides attention depends on other positions, or on their number"
            )
        first = plan.mesh.group(rank, Axis.CP)[0]
        if not same_sums([told[first][1], sums]):
            raise _cannot_cut(
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
            raise _cannot_cut(
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
        raise _cannot_cut("the module makes no call of scaled_dot_product_attention")
    degree = plan.layout.context.ulysses_degree
    if odd := [one for one in calls if one.heads % degree]:
        raise _cannot_cut(f"{odd[0].heads} heads are not shared out over {degree} ranks")
    if staged and (counter.before[0] or counter.after < len(calls)):
        raise _cannot_cut("attention is called outside of the blocks, which no stage has")


def _tensors(output: Any) -> list[torch.Tensor]:
    """Return the first tensor of an output that has positions."""
    leaves = tree_flatten(output)[0]
    found = [one for one in leaves if isinstance(one, torch.Tensor) and one.dim() > 1]
    if not found:
        raise _cannot_cut("the module gives no tensor [B, T, ...]")
    return found[:1]


def _difference(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> str:
    for one, other in zip(found, expected, strict=True):
        if one.shape != other.shape:
            return f"{tuple(one.shape)}, not {tuple(other.shape)}"
        limit = torch.finfo(other.dtype).eps ** _PRECISION * float(other.abs().max())
        if not (worst := float((one - other).abs().max())) <= limit:
            return f"they differ by {worst:.3g}"
    return ""


def _cannot_cut(why: str) -> ConfigError:
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


_HIDDEN = -1e4
"""What is added to a score that does not count is below this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenCall:
    """Say what one call of attention was: heads, their width, and which keys a query meets."""

    heads: int
    kv_heads: int
    head_dim: int
    mask: AttentionMask


class SeenAttention(TorchFunctionMode):
    """Note the calls of attention in one forward of the whole module."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[SeenCall] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Note a call of attention, and make it."""
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            self.calls.append(_described(*args, **kwargs))
        return func(*args, **kwargs)


class CutAttention(TorchFunctionMode):
    """Make calls of attention over the positions of all context ranks."""

    def __init__(
        self, plan: Plan, groups: RankGroups, store: GradientStore, calls: list[SeenCall]
    ) -> None:
        """Expect the calls of `calls`, in their order, in every forward."""
        super().__init__()
        self._plan, self._groups, self._store, self._calls = plan, groups, store, calls
        self._runner: Any = load_reference(plan.layout.context.record.runner)
        self._place: Placement = plan.placement
        self._next = 0
        self._grad = False

    def begin(self, at: int = 0) -> None:
        """Begin a forward, or a stage of it, before the call numbered `at`."""
        self._next = at
        self._grad = torch.is_grad_enabled()

    def end(self, at: int) -> None:
        """RunFailed unless all calls before the one numbered `at` were made."""
        if self._next != at:
            raise _broken(f"a forward made {self._next} calls of attention, where {at} were due")

    def give_time_to(self, store: GradientStore) -> None:
        """Let work of a store be done in the time of transfers."""
        self._store = store

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Take the place of a call of attention."""
        kwargs = kwargs or {}
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        return self._attend(*args, **kwargs)

    def _attend(  # noqa: PLR0913, PLR0917 - as PyTorch calls it
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Return [B, H, T/cp, D]; the mask of a part says nothing, that of the whole was seen."""
        if self._next >= len(self._calls):
            raise _broken(f"a forward made more than {len(self._calls)} calls of attention")
        call = self._calls[self._next]
        self._next += 1
        if dropout_p or (query.shape[1], key.shape[1]) != (call.heads, call.kv_heads):
            raise _broken("a call of attention has other heads than in the example, or dropout")
        if self._grad:
            _check_gradients()
        factor = 1.0 if scale is None else scale * query.shape[-1] ** 0.5
        scaled = query if factor == 1.0 else query * factor
        q, k, v = (one.permute(2, 0, 1, 3) for one in (scaled, key, value))
        out = self._over_ranks(q, k, v, call.mask)
        return out.permute(1, 2, 0, 3)

    def _over_ranks(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: AttentionMask
    ) -> torch.Tensor:
        """Return [T/cp, B, H, D] for q, and k and v [T/cp, B, K, D]."""
        groups, rule = (
            self._groups,
            AttentionRule(
                kernel=self._plan.layout.context.attention,
                planned_capability=self._plan.cluster.device.capability,
            ),
        )
        ring = RingContext(
            ring=groups.ring,
            placement=self._place,
            mask=mask,
            documents=None,
            rule=rule,
            store=self._store,
            tile_rows=None if takes_any_band(q, rule) else TRAINING_PIECES.tile_rows,
        )
        exchanges = groups.ulysses.size > 1
        if exchanges:
            q, k, v = PositionsToHeads.apply(q, k, v, groups.ulysses, self._store)
        if groups.ring.size == 1:
            runs = ring.placement.ring_runs(0)
            out: Any = LocalAttention.apply(q, k, v, ring.tiles(runs, runs), rule)
        else:
            out = self._runner.apply(q.contiguous(), k.contiguous(), v.contiguous(), ring)
        if exchanges:
            out = HeadsToPositions.apply(out, groups.ulysses, self._store)
        return out


def _described(  # noqa: PLR0913, PLR0917 - as PyTorch calls it
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> SeenCall:
    """Return what a call of the whole module is; ConfigError where ours cannot be it."""
    problem = None
    if query.dim() != 4 or query.shape[2] != key.shape[2]:
        problem = f"queries {tuple(query.shape)} meet keys {tuple(key.shape)}"
    elif query.shape[-1] != value.shape[-1]:
        problem = f"values have width {value.shape[-1]} and queries {query.shape[-1]}"
    elif dropout_p:
        problem = f"attention drops {dropout_p:g} of its weights"
    if problem is not None:
        raise _unfit(problem)
    mask = AttentionMask(causal=is_causal) if attn_mask is None else mask_of(attn_mask)
    return SeenCall(
        heads=query.shape[1], kv_heads=key.shape[1], head_dim=query.shape[-1], mask=mask
    )


def mask_of(given: torch.Tensor) -> AttentionMask:
    """Return the rule of a mask [..., T, T], bool or added to scores; ConfigError if none."""
    allowed = given if given.dtype == torch.bool else given == 0
    rows = allowed.reshape(-1, *allowed.shape[-2:])
    whole = rows[0]
    hides = given.dtype == torch.bool or bool((given[~allowed] < _HIDDEN).all())
    if whole.shape[0] != whole.shape[1] or not hides or not bool((rows == whole).all()):
        raise _unfit("a mask of attention is not the same for all sequences, or adds to scores")
    length = whole.shape[0]
    places = torch.arange(length, device=whole.device)
    if bool(whole.all()):
        return AttentionMask(causal=False)
    found = AttentionMask(causal=True)
    if (width := int(whole[-1].sum())) < length:
        found = replace(found, window=width)
    ahead = places[:, None] - places[None, :]
    expected = (ahead >= 0) & (ahead < width)
    if not torch.equal(whole, expected):
        raise _unfit("a mask of attention is neither causal nor a window of positions")
    return found


def _check_gradients() -> None:
    """RunFailed in a forward with gradients where a call of attention may be made again."""
    private: Any = torch._C
    if private._autograd._top_saved_tensors_default_hooks(False) is not None:
        raise _broken("attention is computed again in backward (checkpointing)")
    # The forward of torch.utils.checkpoint with use_reentrant=True has no gradients, and its
    # backward calls attention where nothing takes its place.
    if not torch.is_grad_enabled():
        raise _broken(
            "attention has no gradients in a forward that has some: it is computed again in "
            "backward (checkpointing), or stands in torch.no_grad()"
        )


def _unfit(why: str) -> ConfigError:
    return ConfigError(MODULE_ATTENTION.problem(why, key="mesh.cp", suggestions=("mesh.cp = 1",)))


def _broken(why: str) -> RunFailed:
    return RunFailed(MODULE_ATTENTION.problem(why, suggestions=("mesh.cp = 1",)))
