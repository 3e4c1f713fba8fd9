# SPDX-License-Identifier: Apache-2.0
"""A plan made small enough for a laptop, with everything kept that can go wrong.

The mesh, the schedule, ZeRO (stage, accumulation, resharding, what is cut, where slices rest),
the optimizer and its rules, loss scaling, sequence parallelism, recompute, tied weights, the ratio
of query to key heads, where a window ends, norms, biases, the order of the widths (hidden, queries,
MLP, vocabulary) and every remainder (of the vocabulary over `tp`, of the microbatches over `pp`, of
the blocks over the stages) stay; the sizes go. Ranks of a proof are on CPUs, where fused products
over symmetric memory go around a ring.

No small number makes a mistake neutral. At least two pairs of dims of a head turn: a single pair is
the same interleaved and in halves. The root of no width is a power of two. The mean load of experts
is no whole number. Parameters that begin at 0 or 1 are spread around it.

Of experts stay the expert axis and its fold, several experts on a rank where there were several,
groups and how many of them a token may meet, how many experts it meets, shared experts, a dense
block first, the kind of router, every rule of the balance, drops, and how tokens travel.

A proof has a step on both sides of every change of phase: in warm-up and at its end, before and in
the decay, which is far enough on that another speed or start of it gives another rate. Where
something counts updates (bias corrections, a loss scale that changes, biases of experts) there are
five of them, so that one count off, or one that begins anew, is seen. No plan takes more steps than
it needs: most of the time of a proof goes by steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, count, pairwise
from math import floor, isqrt, lcm, pi
from typing import Any

from echelon.core.choices.kernels import Kernels
from echelon.core.choices.local_sgd import LocalSgd
from echelon.core.choices.optimizers import OPTIMIZERS
from echelon.core.experts import Balance
from echelon.core.model_shape import Experts, LatentAttention, LayerKind, ModelShape, RopeScaling
from echelon.core.parameters import family_of, parameters
from echelon.core.plan import DTYPE_BYTES, DType, Mathematics, Optimizer, Plan, Precision, Zero
from echelon.cost.bytes.context_sent import kv_copies
from echelon.schedule.build import SCHEDULES

DTYPE_SETTINGS = ("parameters", "gradients", "reduction", "master")
"""Settings of a precision that name a dtype."""
_SIGNAL = 1e-3  # epsilon of AdamW
_UNCLIPPED_SIGNAL = 0.1  # epsilon of AdamW
_BUCKETS = 3  # of each rank
_NAMED_APART = 11
"""Blocks from which on names in the order of text are not in the order of numbers."""
_BUCKETS_NAMED_APART = 22
"""Buckets that are asked for to have 11: no parameter is in two, so that some are not full."""
_LEAST_MICROBATCHES = 4
"""So many, or one more: an error that begins with the fourth microbatch is seen."""
_LEAST_WIDTH = 3  # elements of a tensor rank
_ROOM = 3  # elements of a tensor rank
_CHUNK = 4  # tokens
_HEAD_DIM = 6
"""Width of a head: three pairs of dims, and a root that differs from other factors."""
_TURNED_DIMS = 4
"""Dims of a head that turn if not all do: two pairs."""
_SPREAD = 0.3
"""Largest distance from 0 or 1 of the first norms, biases and sinks."""
_LIMIT = 0.6
"""Clamp of inner activations of experts: some activations of a small model are larger."""
_BLOCK = 4
"""Numbers that share a scale; every width of a small model is a multiple of it."""
_LONGEST_HISTORY = 2
"""Steps that scales of 8 bits look back on: the first is forgotten before a proof ends."""
_SGD_RATE = 1.0  # learning rate
_UNCLIPPED_SGD_RATE = 5e-3  # learning rate
_SGD_DECAY = 2e-3  # weight decay


def shrink(plan: Plan, *, precision: DType | None = None, names_apart: bool = False) -> Plan:
    """Return a small plan with the shape of `plan`; all in `precision` where it is given.

    With `names_apart` it has, where ranks look up tensors by their names, so many blocks and
    buckets that the order of the names as text is another one.
    """
    names_apart = names_apart and _looks_up_names(plan)
    # Two units of a stage are there, so that one can be taken for the other.
    stages = shrink_stages(
        plan.layout.pipeline.stages,
        unit=min(plan.layout.zero.unit_blocks, 2),
        least=_NAMED_APART if names_apart else 0,
    )
    sequence_length = _sequence_length(plan)
    model = _model(plan, sum(len(stage) for stage in stages), sequence_length)
    experts = model.experts
    # In few digits an element may be clamped on one side alone, and have no gradient there.
    if precision == "fp64" and experts is not None and experts.limit is not None:
        model = replace(model, experts=replace(experts, limit=min(experts.limit, _LIMIT)))
    microbatch = min(plan.layout.microbatch_sequences, 2)
    num_microbatches = _num_microbatches(plan)
    mathematics = replace(
        plan.mathematics,
        model=model,
        global_sequences=microbatch * num_microbatches * plan.mesh.dp,
        sequence_length=sequence_length,
        optimizer=_optimizer(small_schedule(plan)),
        precision=_precision(plan.mathematics.precision, precision),
        balance=small_balance(plan.mathematics.balance, model.experts, sequence_length),
        local_sgd=small_rounds(plan.mathematics.local_sgd, model.layers),
    )
    layout = plan.layout
    small = replace(
        layout,
        microbatch_sequences=microbatch,
        pipeline=replace(layout.pipeline, stages=stages),
        recompute=replace(layout.recompute, every=min(layout.recompute.every, 2)),
        zero=_zero(plan, mathematics, _BUCKETS_NAMED_APART if names_apart else _BUCKETS),
        tp_overlap="none" if layout.tp_overlap == "none" else "ring",
        # Two chunks at most: any small batch can be cut in them. Nodes stay, for the mesh does.
        experts=replace(layout.experts, chunks=min(layout.experts.chunks, 2)),
        kernels=_kernels(layout.kernels, mathematics.precision),
    )
    return replace(plan, name=f"{plan.name}, shrunk", mathematics=mathematics, layout=small)


def _kernels(kernels: Kernels, precision: Precision) -> Kernels:
    """Return the kernels without the update, whose kernel is of fp32, where masters are others."""
    if precision.master == "fp32":
        return kernels
    fused = tuple(piece for piece in kernels.fused if piece != "update")
    return replace(kernels, fused=fused) if fused else Kernels()


def _precision(precision: Precision, dtype: DType | None) -> Precision:
    """Return the precision of a proof: few steps must be enough for the loss scale to change."""
    small = precision
    if precision.is_fp8:
        history = min(precision.fp8_history, _LONGEST_HISTORY)
        small = replace(small, fp8_block=_BLOCK, fp8_history=history)
    if precision.int8_block:
        small = replace(small, int8_block=_BLOCK)
    if precision.loss_scaling == "dynamic":
        small = replace(
            small,
            loss_scale_window=min(precision.loss_scale_window, 2),
            loss_scale_hysteresis=min(precision.loss_scale_hysteresis, 2),
        )
    return small if dtype is None else replace(small, **dict.fromkeys(DTYPE_SETTINGS, dtype))


def _model(plan: Plan, layers: int, sequence_length: int) -> ModelShape:
    shape, tp = plan.model, plan.mesh.tp
    precision = plan.mathematics.precision
    tile = _BLOCK if precision.is_fp8 or precision.int8_block else 1
    latent = small_latent(shape, tile)
    head_dim = lcm(_HEAD_DIM, tile) if latent is None else latent.nope_dim + latent.rope_dim
    kv_heads = tp * _kv_heads(plan)
    heads = kv_heads * (shape.heads // shape.kv_heads)
    hidden = _hidden(shape, heads * head_dim, tp)
    cut = tile * tp
    beside = [(shape.hidden, hidden)]
    ffn = _width(shape.ffn, beside, 12, tp=cut)
    vocab = _width(shape.vocab, [*beside, (shape.ffn, ffn)], 24, tp=tp, rest=shape.vocab % tp)
    spare_positions = 3 if shape.max_positions > plan.mathematics.sequence_length else 0
    return replace(
        shape,
        name=f"{shape.name}-shrunk",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=ffn,
        vocab=vocab,
        max_positions=sequence_length + spare_positions,
        window=_window(plan, sequence_length),
        layer_kinds=small_kinds(shape, layers),
        rope_scaling=small_stretch(
            plan, sequence_length, head_dim if latent is None else latent.rope_dim
        ),
        latent=latent,
        **_turns(shape, head_dim),
        experts=small_experts(
            plan, layers, sequence_length, lambda size: _width(size, beside, 12, tp=cut)
        ),
        # A narrow model needs wide weights: with the std of a wide one its blocks would add next
        # to nothing to the residual stream, and a wrong one would hardly show.
        initial_std=max(shape.initial_std, hidden**-0.5),
        initial_spread=_SPREAD,
    )


def _turns(shape: ModelShape, head_dim: int) -> dict[str, Any]:
    """Return the rotary dims of small heads: all or two pairs; none in some blocks, as given."""
    rotary = shape.rotary
    fraction = _TURNED_DIMS / head_dim if 0 < rotary.fraction < 1 else rotary.fraction
    return {"rotary": replace(rotary, fraction=fraction, none_every=min(rotary.none_every, 2))}


def _hidden(shape: ModelShape, query_dim: int, tp: int) -> int:
    """Return a width beside that of all queries as the model's own width is beside it."""
    if shape.hidden == shape.query_dim:
        return query_dim
    if shape.hidden > shape.query_dim:
        return query_dim + lcm(2 * _HEAD_DIM, tp)
    less = lcm(_BLOCK, tp)
    widths = range((query_dim - 1) // less * less, 0, -less)
    # Squares are left out: one over the root of 16 is a factor that others are, too.
    return next((width for width in widths if isqrt(width) ** 2 != width), less)


def _width(
    size: int, beside: Iterable[tuple[int, int]], default: int, *, tp: int, rest: int = 0
) -> int:
    """Return a small width that is to others as `size` is to them: larger, smaller or equal.

    `beside` has each of the others as it is in the plan and as it is now. It is `rest` more than a
    multiple of `tp`, and about `default` where nothing says otherwise.
    """
    low = max((now for was, now in beside if was < size), default=0)
    high = min((now for was, now in beside if was > size), default=None)
    equal = [now for was, now in beside if was == size and (now - rest) % tp == 0]
    if equal:
        return equal[0]
    most = None if high is None else (high - 1 - rest) // tp
    # Room is left for a width between this one and the next smaller.
    wanted = max(_LEAST_WIDTH, default // tp, low and (low - rest) // tp + _ROOM)
    return tp * (wanted if most is None else max(_LEAST_WIDTH, min(wanted, most))) + rest


def _looks_up_names(plan: Plan) -> bool:
    """Return whether a rank finds tensors of others, or where they rest, by their names.

    Models with experts do so in the same code, and a block of them takes as long as several.
    """
    zero, mesh = plan.layout.zero, plan.mesh
    whole = OPTIMIZERS[plan.mathematics.optimizer.kind].needs_whole_matrices
    offloaded = {zero.optimizer_offload, zero.parameter_offload} != {"none"}
    dense = plan.model.experts is None
    return dense and (offloaded or (whole and mesh.world_size > mesh.pp))


def _kv_heads(plan: Plan) -> int:
    """Return few key/value heads for a tensor rank, copied as often by Ulysses as the plan's."""
    held, degree = max(1, plan.model.kv_heads // plan.mesh.tp), plan.layout.context.ulysses_degree
    repeats = plan.model.heads // plan.model.kv_heads
    if held * repeats % degree:
        return held
    copies = kv_copies(held * repeats, held, degree)
    return next(
        few
        for few in range(min(2, held), held + 1)
        if few * repeats % degree == 0 and kv_copies(few * repeats, few, degree) == copies
    )


def _sequence_length(plan: Plan) -> int:
    """Return a length that every layout can cut, with a few positions in each piece of it."""
    chunks = plan.mesh.tp * plan.mesh.cp * 2
    if plan.mesh.cp == 1:
        return chunks * max(1, 8 // chunks)
    return chunks * max(1, -(-_CHUNK // plan.mesh.tp))


def _window(plan: Plan, sequence_length: int) -> int | None:
    """Return a window that is as long beside a chunk of a context rank as the plan's is.

    One shorter than a chunk stays so, one that ends in another chunk does so.
    """
    window, length = plan.model.window, plan.mathematics.sequence_length
    if window is None or window >= length:
        return None if window is None else sequence_length
    chunks = 2 * plan.mesh.cp
    chunk, whole = sequence_length // chunks, window * chunks // length
    within = window * chunks % length * chunk // length
    within = within if whole else max(1, within)
    return max(2, min(whole * chunk + within, sequence_length - 1))


def _num_microbatches(plan: Plan) -> int:
    """Return few microbatches with the remainder over `pp` of the plan's, and enough for it.

    A schedule that is written out has as many as it has.
    """
    count, pp = plan.num_microbatches, plan.mesh.pp
    if pp == 1:
        return min(count, _LEAST_MICROBATCHES + count % 2)
    if count <= pp or plan.layout.pipeline.rows:
        return count
    few = pp + (count % pp or pp)
    builder = SCHEDULES[plan.layout.pipeline.schedule]
    while few < count and (few < _LEAST_MICROBATCHES or not builder.allows_microbatches(pp, few)):
        few += pp
    return min(count, few)


def _optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer with constants under which every mistake in it shows.

    AdamW's first step is the sign of the gradient when `eps` is tiny: a gradient twice too large,
    or a clip by the wrong norm, would leave the same weights. With `eps` of the size of a clipped
    gradient the update follows the gradient's size. Clipping, where it is on, must act; the
    learning rate must differ at each step; the decay must be larger than the noise. SGD moves by
    the size of a clipped gradient itself, and couples the decay to it: both need other sizes. One
    that is not clipped is several hundred times as long, and must not make the model diverge.
    """
    sgd = not OPTIMIZERS[optimizer.kind].is_scale_free
    sgd_rate = _UNCLIPPED_SGD_RATE if optimizer.clip_norm is None else _SGD_RATE
    return replace(
        optimizer,
        learning_rate=sgd_rate if sgd else 1e-2,
        eps=_UNCLIPPED_SIGNAL if optimizer.clip_norm is None else _SIGNAL,
        clip_norm=None if optimizer.clip_norm is None else 50 * _SIGNAL,
        weight_decay=(_SGD_DECAY if sgd else 0.1) if optimizer.weight_decay else 0.0,
    )


def _zero(plan: Plan, mathematics: Mathematics, buckets: int) -> Zero:
    """Return ZeRO's settings with as little ahead and in memory as shows what they do.

    A rank has about so many `buckets`.
    """
    zero, model = plan.layout.zero, mathematics.model
    # Several buckets per rank, as the whole model has: one of them may be the wrong one.
    bytes_per_rank = elements_of_a_rank(plan, model) * DTYPE_BYTES[mathematics.precision.gradients]
    return replace(
        zero,
        bucket_bytes=min(zero.bucket_bytes, max(1, bytes_per_rank // buckets)),
        prefetch=min(zero.prefetch, 2),
        unit_blocks=min(zero.unit_blocks, 2),
        keep_whole_below=_keep_whole_below(plan, model),
        offload_buffers=min(zero.offload_buffers, 2),
    )


def _keep_whole_below(plan: Plan, model: ModelShape) -> int:
    """Return the threshold under which the same kinds of parameters are kept whole."""
    threshold, tp = plan.layout.zero.keep_whole_below, plan.mesh.tp
    kinds = {
        family_of(spec.name) for spec in parameters(plan.model) if spec.local_numel(tp) < threshold
    }
    sizes = [s.local_numel(tp) for s in parameters(model) if family_of(s.name) in kinds]
    return max(sizes) + 1 if sizes else 0


def small_kinds(shape: ModelShape, layers: int) -> tuple[LayerKind, ...]:
    """Return kinds of blocks of which `layers` blocks have as many different ones as can be.

    A long run of one kind is as good as one block of it.
    """
    kinds = shape.layer_kinds
    if len(kinds) <= layers:
        return kinds
    befores: tuple[LayerKind | None, ...] = (None, *kinds)
    changes: list[LayerKind] = [
        kind for kind, before in zip(kinds, befores, strict=False) if kind != before
    ]
    return tuple(changes[:layers])


def small_stretch(plan: Plan, sequence_length: int, width: int) -> RopeScaling | None:
    """Return a stretch of a small model: with a divisor for each frequency that it has left.

    Sequences that were longer than the original positions are so still. The second
    frequency of llama3 is a blend of a low and a high frequency.
    """
    scaling = plan.model.rope_scaling
    if scaling is None or scaling.kind not in ("longrope", "llama3"):
        return scaling
    original = scaling.original_positions
    assert original is not None, "a rule asks for it"
    if scaling.kind == "llama3":
        ends = (scaling.low_frequency_factor or 1.0, scaling.high_frequency_factor or 1.0)
        turned = width if plan.model.rotary.fraction == 1 else _TURNED_DIMS
        wave = 2 * pi * plan.model.rope_theta ** (2 / turned)
        return replace(scaling, original_positions=max(2, round(wave * sum(ends) / 2)))
    longer = plan.mathematics.sequence_length > original

    def few(factors: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(factors[pair % len(factors)] for pair in range(width // 2))

    return replace(
        scaling,
        original_positions=max(2, sequence_length // 2 if longer else sequence_length),
        short_factors=few(scaling.short_factors),
        long_factors=few(scaling.long_factors),
    )


_SEVERAL = 2  # experts
_WITHOUT_RANKS = 4  # experts
_LEAST_AUX = 0.01  # coefficient of the auxiliary loss
_LEAST_Z = 1e-3  # coefficient of the z-loss
_LEAST_RATE = 0.02
"""A bias that moves by less sends no token of a small model elsewhere in three steps."""


def small_experts(
    plan: Plan, layers: int, length: int, width: Callable[[int], int]
) -> Experts | None:
    """Return the mixture of a model of `layers` blocks; nothing of a dense one.

    Sequences are of `length` tokens; `width` makes a width of an MLP small.
    """
    experts = plan.model.experts
    if experts is None:
        return None
    routed = length * experts.top_k
    return replace(
        experts,
        num_experts=_num_experts(experts, plan.mesh.ep, routed),
        ffn=width(experts.ffn),
        shared_experts=min(experts.shared_experts, _SEVERAL),
        first_dense_layers=min(experts.first_dense_layers, 1, layers - 1),
    )


def _num_experts(experts: Experts, ep: int, routed: int) -> int:
    """Return the fewest experts among which all choices are left that there were.

    If there is such a number, it does not divide the `routed` tokens of a sequence.
    """
    groups, top_groups, top_k = experts.groups, experts.top_groups, experts.top_k
    per_rank, per_group = experts.num_experts // ep, experts.num_experts // groups
    within = top_groups * per_group > top_k
    fewest = min(experts.num_experts, _WITHOUT_RANKS)
    step, enough = lcm(ep, groups), 0
    for number in count(step, step):
        if enough and number > max(experts.num_experts, enough):
            return enough
        size = number // groups
        choices = top_groups * size
        if (
            number >= fewest
            and number // ep >= min(per_rank, _SEVERAL)
            and size >= min(per_group, _SEVERAL)
            and choices >= top_k + within
        ):
            if routed % number:
                return number
            enough = enough or number
    raise AssertionError("numbers end")


def small_latent(shape: ModelShape, tile: int = 1) -> LatentAttention | None:
    """Return narrow latent attention; its values stay narrower than keys, or as wide.

    Its widths are multiples of `tile`.
    """
    latent = shape.latent
    if latent is None:
        return None
    nope, rope = _HEAD_DIM, _TURNED_DIMS
    widths = {latent.nope_dim: nope, latent.nope_dim + latent.rope_dim: nope + rope}
    between = nope - 1 if latent.value_dim < latent.nope_dim else nope + 1
    return LatentAttention(
        query_rank=None if latent.query_rank is None else 11 * tile,
        kv_rank=7 * tile,
        nope_dim=nope * tile,
        rope_dim=rope * tile,
        value_dim=widths.get(latent.value_dim, between) * tile,
    )


def small_balance(balance: Balance, experts: Experts | None, length: int) -> Balance:
    """Return the balance with coefficients that show, and room for some tokens only."""
    if experts is None:
        return balance
    factor = balance.capacity_factor
    if factor is not None:
        mean = length * experts.top_k / experts.num_experts
        factor = min(factor, max(1, floor(mean)) / mean)
    return replace(
        balance,
        aux_coefficient=max(balance.aux_coefficient, _LEAST_AUX),
        z_coefficient=max(balance.z_coefficient, _LEAST_Z) if balance.z_coefficient else 0.0,
        bias_rate=max(balance.bias_rate, _LEAST_RATE),
        capacity_factor=factor,
    )


def elements_of_a_rank(plan: Plan, model: ModelShape) -> int:
    """Return about how many elements of `model` one rank of `plan` computes with."""
    mesh, pieces = plan.mesh, plan.layout.experts.expert_tp
    total = sum(
        spec.numel // (mesh.tp if spec.expert is None else mesh.ep * pieces)
        for spec in parameters(model)
    )
    return total // mesh.pp


_ALL_KEEP_SEVERAL = 2
"""Stages up to which all keep several blocks; of more stages, one does."""


def shrink_stages(
    stages: tuple[tuple[int, ...], ...], *, unit: int = 1, least: int = 0
) -> tuple[tuple[int, ...], ...]:
    """Return as many stages with few blocks each; uneven ones stay uneven, empty ones empty.

    Each stage gets the rank of its block count among the different counts, so an order between
    two stages is kept. Up to two stages keep `unit` + 1 blocks each where they have as many, so a
    block that feeds a block of its own stage, and of another unit, is there; of more stages one
    of the longest does, even where all are as long. There are `least` blocks in all, or as many
    as there were.
    """
    counts = [len(stage) for stage in stages]
    ranks = {count: index for index, count in enumerate(sorted({c for c in counts if c}), start=1)}
    smallest = min(ranks, default=0)
    extra = min(unit, smallest - 1) if smallest and len(stages) <= _ALL_KEEP_SEVERAL else 0
    small = [ranks[count] + extra if count else 0 for count in counts]
    longest = max(counts, default=0)
    # One in the middle of the pipeline, where there is one: it has neither end beside its blocks.
    middle = max(range(len(counts)), key=lambda i: (counts[i] == longest, 0 < i < len(counts) - 1))
    small[middle] = max(small[middle], min(longest, unit + 1))
    while sum(small) < min(least, sum(counts)):
        small = [min(few + 1, count) for few, count in zip(small, counts, strict=True)]
    return stages_of(small)


def stages_of(counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return stages of so many blocks each, one after the other."""
    return tuple(tuple(range(*ends)) for ends in pairwise(accumulate(counts, initial=0)))


ROUNDED_UPDATES = 3
"""Updates in the plan's own precision: one without history, one with, one after a rounded one."""

_LEAST_UPDATES = 3  # where nothing counts them
_COUNTED_UPDATES = 5  # where something does
_WARMUP_STEPS = 2
_MOST_OVERFLOWS = 2  # before a dynamic loss scale falls
_STEPS_OF_DECAY = 3
"""Where the decay begins, a third of it on, and two thirds."""
_ROUNDS = 2  # of local SGD: the second one has a momentum
_LONGEST_ROUND = 3  # steps
_OUTER_BLOCK = 11  # numbers of a row: several blocks, the last shorter
_STEPS_OF_LATE_DECAY = 2
"""The same of a decay that has a flat phase before it, which is seen too."""


def num_overflows(plan: Plan) -> int:
    """Return how many steps of a proof in float64 overflow, so that nothing is updated."""
    precision = plan.mathematics.precision
    dynamic = precision.loss_scaling == "dynamic"
    return min(precision.loss_scale_hysteresis, _MOST_OVERFLOWS) if dynamic else 0


def num_steps(plan: Plan) -> int:
    """Return the steps of a proof in float64, those that an overflow skips among them."""
    return num_updates(plan.mathematics) + num_overflows(plan)


def num_rounded_steps(plan: Plan) -> int:
    """Return the steps of a proof in the plan's own precision: the first of those in float64."""
    return ROUNDED_UPDATES + num_overflows(plan)


def num_updates(mathematics: Mathematics) -> int:
    """Return how many updates show every phase of the schedule, and every count."""
    optimizer = mathematics.optimizer
    counts = (
        # What does not follow the size of gradients is corrected by the number of updates.
        OPTIMIZERS[optimizer.kind].is_scale_free
        or mathematics.precision.loss_scaling == "dynamic"
        or (mathematics.model.experts is not None and mathematics.balance.has_bias)
    )
    warmup = _WARMUP_STEPS if optimizer.warmup_steps else 0
    after = 1 if optimizer.schedule == "constant" else _STEPS_OF_DECAY
    local = small_rounds(mathematics.local_sgd)
    rounds = _ROUNDS * local.every + local.delay
    return max(_COUNTED_UPDATES if counts else _LEAST_UPDATES, warmup + after, rounds)


def small_rounds(local: LocalSgd, layers: int | None = None) -> LocalSgd:
    """Return rounds of local SGD that are short enough for two of them in a proof.

    What comes late still does, and a model in fragments has several, at most one for each of its
    `layers`.
    """
    every = min(local.every, _LONGEST_ROUND)
    fragments = min(local.fragments, max(1, every), layers or local.fragments)
    return replace(
        local,
        every=every,
        fragments=fragments,
        delay=min(local.delay, max(0, every - 1)),
        outer_block=min(local.outer_block, _OUTER_BLOCK if local.quantised else local.outer_block),
    )


def small_schedule(plan: Plan) -> Optimizer:
    """Return the optimizer with a schedule whose phases all are in the steps of a proof.

    Steps that an overflow skips come after the first one, and take a place in the schedule.
    """
    optimizer, skipped = plan.mathematics.optimizer, num_overflows(plan)
    return replace(
        optimizer,
        warmup_steps=_WARMUP_STEPS + skipped if optimizer.warmup_steps else 0,
        decay_steps=_STEPS_OF_LATE_DECAY if optimizer.schedule == "wsd" else 0,
        total_steps=num_steps(plan),
    )
