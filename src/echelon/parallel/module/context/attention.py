# SPDX-License-Identifier: Apache-2.0
"""The attention of a module: its calls are seen once, and replaced by ours from then on.

Split: the positions of every sequence, as in `parallel/context`.
Sent:  as in `parallel/context`: keys and values around a ring or gathered, or heads for positions.
Bytes: `module_context_bytes` in `tests/parallel/module/sent_bytes.py`.
Must divide: cp | sequence_length (2 ring_degree under zigzag); ulysses_degree | heads.
Source: Liu et al., "Ring Attention", 2023; Jacobs et al., "DeepSpeed-Ulysses", 2023.

Shape suffixes: B sequences, H query and K key/value heads, T positions, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from echelon.core.attention_mask import AttentionMask, Placement
from echelon.core.choices.registry import load_reference
from echelon.core.errors import ConfigError, RunFailed
from echelon.core.plan import Plan
from echelon.core.rulebook.module import MODULE_ATTENTION
from echelon.models.attention.local import AttentionRule, LocalAttention, takes_any_band
from echelon.models.piece_sizes import TRAINING_PIECES
from echelon.parallel.context.attention import RingContext
from echelon.parallel.context.ulysses import HeadsToPositions, PositionsToHeads
from echelon.parallel.device_mesh import RankGroups
from echelon.parallel.storage.gradients import GradientStore

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
        """Have seen nothing."""
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
