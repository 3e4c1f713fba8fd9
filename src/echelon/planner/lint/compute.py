# SPDX-License-Identifier: Apache-2.0
"""Lints about what is computed: an assumed model, dtypes, matrices too small or too odd."""

from __future__ import annotations

from echelon.core.axis import LOSS_AXES
from echelon.core.plan import DTYPE_BYTES, Plan
from echelon.layout.expert_load import rows_per_expert
from echelon.planner.lint.finding import LintMatch, lint_of

NARROW = 1024  # columns of a matrix
_FEW_TOKENS = 1024  # tokens of a microbatch
_FEW_ROWS = 64  # rows of an expert
ALIGNED = 64  # elements
_MUCH_FASTER = 2.0  # times the peak of fp32
_MANY_RANKS = 16  # ranks
_GPU_FLOPS = 10e12
"""FLOP/s from which shapes matter as they do on tensor cores."""


def _is_gpu(plan: Plan) -> bool:
    peaks = (rate for _, rate in plan.cluster.device.peak_flops)
    return max(peaks, default=0.0) >= _GPU_FLOPS


@lint_of("assumed-model", "numbers", "Touvron et al., 2023: the decoder that is assumed")
def _assumed(plan: Plan) -> LintMatch | None:
    """What is assumed of a model decides every number of its plan, and is seldom all of it so."""
    count = len(plan.model.assumed)
    if not count or plan.model.assume:
        return None
    return (
        f"{count} {'things are' if count > 1 else 'thing is'} assumed of {plan.model.name}, whose "
        "architecture is not known: it is planned, and not trained",
        "settings of [model] for what is otherwise, and model.assume = true",
    )


@lint_of(
    "fp32-on-tensor-cores", "time", "distributed, best practices (distributed-42, distributed-43)"
)
def _single(plan: Plan) -> LintMatch | None:
    """Matrix units compute 16-bit products many times as fast; model states stay 16 bytes a weight,
    activations and messages halve.
    """
    device, dtype = plan.cluster.device, plan.mathematics.precision.parameters
    wide, narrow = device.flops("fp32"), device.flops("bf16") or device.flops("fp16")
    if dtype != "fp32" or wide is None or narrow is None or narrow <= _MUCH_FASTER * wide:
        return None
    name = "bf16" if device.flops("bf16") else "fp16"
    return (
        f"parameters in fp32: {wide / 1e12:,.0f} TFLOP/s of {device.name}, {name} has "
        f"{narrow / 1e12:,.0f}",
        f"precision.parameters = {name}; gradients, sums and the master stay fp32",
    )


@lint_of("fp16-where-bf16-is", "numbers", "Kalamkar et al., 2019")
def _half(plan: Plan) -> LintMatch | None:
    """bf16 has the range of fp32, so no loss scale and no skipped steps."""
    device, dtype = plan.cluster.device, plan.mathematics.precision.parameters
    if dtype != "fp16" or device.flops("bf16") is None:
        return None
    return (
        f"fp16 ends at 65,504 and needs a loss scale; {device.name} has bf16 at the same rate",
        "precision.parameters = bf16",
    )


@lint_of("reduction-in-16-bits", "numbers", "Higham, Accuracy and Stability, 2002, section 4.2")
def _reduced(plan: Plan) -> LintMatch | None:
    """Each sum rounds to the bits of the dtype; errors grow with the ranks that add."""
    dtype, ranks = plan.mathematics.precision.reduction, plan.mesh.degree(*LOSS_AXES)
    if DTYPE_BYTES[dtype] > 2 or ranks < _MANY_RANKS:
        return None
    bits = 8 if dtype == "bf16" else 11
    return (
        f"gradients of {ranks} ranks are added in {dtype}: {ranks - 1} sums of {bits} "
        f"bits, up to {(ranks - 1) * 2.0**-bits:.2g} of the result lost",
        "precision.reduction = fp32",
    )


@lint_of("narrow-matrices", "time", "Narayanan et al., 2021, section 5.4")
def _narrow(plan: Plan) -> LintMatch | None:
    """A shard narrower than about 1024 does not fill a GPU, and still waits for its sum."""
    model, tp = plan.model, plan.mesh.tp
    width = min(model.hidden, model.ffn, model.query_dim) // tp
    if tp == 1 or width >= NARROW or not _is_gpu(plan):
        return None
    return (
        f"tp = {tp} leaves matrices {width} wide (hidden {model.hidden}): too little work for a "
        "launch and a sum",
        f"mesh.tp of at most {_widest(tp, width)}",
    )


def _widest(tp: int, width: int) -> int:
    """Return the highest degree below `tp` that leaves shards wide enough, or 1."""
    fits = (d for d in range(1, tp) if tp % d == 0 and width * tp // d >= NARROW)
    return max(fits, default=1)


@lint_of("few-tokens", "time", "Williams et al., Roofline, 2009")
def _few_tokens(plan: Plan) -> LintMatch | None:
    """A product of few rows is bound by reading weights, not by arithmetic."""
    tokens = plan.local_tokens
    if tokens >= _FEW_TOKENS or not _is_gpu(plan):
        return None
    return (
        f"a microbatch has {tokens} positions on a rank: weights are read for few rows",
        "batch.microbatch_sequences up, or mesh.cp down",
    )


@lint_of(
    "vocabulary-not-aligned",
    "time",
    "Shoeybi et al., 2019, section 3; Anthony et al., 2024, section 6",
)
def _vocabulary(plan: Plan) -> LintMatch | None:
    """Tiles of matrix units are 64 or more wide; Megatron-LM pads to 128 x tp."""
    vocab, tp = plan.model.vocab, plan.mesh.tp
    multiple = ALIGNED * tp
    if vocab % multiple == 0 or not _is_gpu(plan):
        return None
    padded = -(-vocab // multiple) * multiple
    return (
        f"vocabulary {vocab:,} % ({ALIGNED} x tp {tp}) = {vocab % multiple}: the head's matrix "
        "has ragged tiles",
        f"model.vocab = {padded:,} ({padded - vocab} ids more, never used)",
    )


@lint_of(
    "widths-not-aligned",
    "time",
    "Anthony et al., The Case for Co-Designing Model Architectures, 2024, section 6",
)
def _odd_width(plan: Plan) -> LintMatch | None:
    """Widths that are no multiple of 64 leave parts of tiles unused."""
    model, tp = plan.model, plan.mesh.tp
    widths = {"hidden": model.hidden, "ffn / tp": model.ffn // tp}
    odd = {name: width for name, width in widths.items() if width % ALIGNED}
    if not odd or not _is_gpu(plan):
        return None
    shown = ", ".join(f"{name} = {width:,}" for name, width in odd.items())
    return (
        f"{shown}: no multiple of {ALIGNED}, so tiles of matrix units are cut",
        f"widths that are multiples of {ALIGNED} x tp",
    )


@lint_of("few-rows-an-expert", "time", "DeepSeek-V3, 2024, section 3.4")
def _few_rows(plan: Plan) -> LintMatch | None:
    """A grouped product over many experts with few rows each reads weights for little."""
    if plan.model.experts is None:
        return None
    rows = rows_per_expert(plan)
    if rows >= _FEW_ROWS or not _is_gpu(plan):
        return None
    return (
        f"an expert meets {rows:.0f} rows of a microbatch: its weights are read for little",
        "larger microbatches, or mesh.ep up: rows of more ranks meet one expert",
    )


COMPUTE = (
    _assumed,
    _single,
    _half,
    _reduced,
    _narrow,
    _few_tokens,
    _vocabulary,
    _odd_width,
    _few_rows,
)
