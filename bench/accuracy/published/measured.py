"""What a row measured: the seconds of a step, tokens per second and device, memory.

Seconds are the row's own, or follow from tokens per second, or from FLOP/s by the way in which its
publisher counts FLOPs. In a step of B sequences of s tokens, l layers of width h, vocabulary V:

    hardware FLOPs with full recompute  96 B s l h^2 (1 + s / 6h + V / 16 l h)  (Narayanan et al.)
    the same without it                 72 B s l h^2 (1 + s / 6h + V / 12 l h)
    model FLOPs                         B s (6 N + 12 l h s), N parameters that a token meets
    model FLOPs, causal attention       B s (6 N + 6 l h s)
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from bench.accuracy.published.memory_settings import memory_kind
from bench.accuracy.published.plans import sequences_of
from bench.accuracy.published.rows import Row
from echelon.cost.inputs.numbers import ModelNumbers

RESULTS = (
    "step_time_s",
    "tokens_per_s_per_gpu",
    "norm_tokens_per_s_per_gpu",
    "tflops_per_gpu",
    "mfu_pct",
    "hfu_pct",
    "mem_per_gpu_gb",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Give what was measured; None where a row does not say. Memory is in the row's GB.

    A row that says nothing at all is `silent`: beside others of its source it was tried and did not
    run; where no row of a source has a result, they were left out of the file.
    """

    step_s: float | None
    tokens_per_s: float | None
    memory_gb: float | None
    out_of_memory: bool
    silent: bool
    how: str
    memory_kind: str = "reserved"
    """Whether `memory_gb` is allocated, reserved or the driver's."""


def measured(row: Row, model: ModelNumbers, devices: float, peak: float) -> Measured:
    """Return what a row measured on so many devices of such a peak (FLOP/s)."""
    batch = sequences_of(row, model)
    tokens = batch * float(model.length) if batch else None
    step, how = _step(row, model, tokens, devices, peak)
    return Measured(
        step_s=step,
        tokens_per_s=tokens / devices / step if tokens and step else None,
        memory_gb=row.positive("mem_per_gpu_gb"),
        out_of_memory=_out_of_memory(row),
        silent=not any(row.positive(column) for column in RESULTS),
        how=how,
        memory_kind=memory_kind(row),
    )


def _step(
    row: Row, model: ModelNumbers, tokens: float | None, devices: float, peak: float
) -> tuple[float | None, str]:
    seconds = row.positive("step_time_s")
    if seconds:
        return seconds, "step_time_s"
    if not tokens:
        return None, ""
    for column in ("tokens_per_s_per_gpu", "norm_tokens_per_s_per_gpu"):
        rate = row.positive(column)
        if rate:
            return tokens / devices / rate, column
    rate = row.positive("tflops_per_gpu")
    if rate:
        return step_flops(row, model, tokens) / (devices * rate * 1e12), "tflops_per_gpu"
    share = row.positive("mfu_pct")
    if share:
        flops = tokens * model_flops(row, model, causal=False)
        return flops / (devices * share / 100.0 * peak), "mfu_pct"
    return None, ""


def step_flops(row: Row, model: ModelNumbers, tokens: float) -> float:
    """Return the FLOPs of a step as the publisher of a row counts them."""
    says = row.word("flops_convention").lower()
    layers, hidden = float(model.layers), float(model.hidden)
    length, vocab = float(model.length), float(model.vocab)
    again = row.word("recompute").lower().startswith("full")
    hardware = "hardware" in says or "96" in says.replace(" ", "")
    if "no recompute" in says or "72b" in says.replace(" ", "").replace("*", ""):
        hardware = False
    elif hardware or ("megatron formula" in says and again):
        passes = 4.0 if again or "incl" in says else 3.0
        # A gated MLP or fewer key heads are not in the formula, but are in its parameters.
        whole = 24.0 * layers * hidden**2 * (1.0 + length / (6.0 * hidden)) * passes
        return tokens * (whole + 6.0 * vocab * hidden)
    return tokens * model_flops(row, model, causal="causal" in says and "non-causal" not in says)


def model_flops(row: Row, model: ModelNumbers, *, causal: bool) -> float:
    """Return the FLOPs of a token, forward and backward: 6 N + 12 l h s, or half of the latter."""
    attention = 12.0 * float(model.layers) * float(model.attention_dim) * float(model.length)
    return 6.0 * active_params(row, model) + attention * (0.5 if causal else 1.0)


def active_params(row: Row, model: ModelNumbers) -> float:
    """Return the parameters that a token meets: the row's, or those of its sizes."""
    given = row.positive("params_active")
    if given is None and not model.experts:
        given = row.positive("params_total")
    if given is not None:
        return given
    matrices = 1.0 + float(model.up)
    attention = model.hidden * (2.0 * model.query_dim + 2.0 * model.kv_dim)
    if model.kv_rank:
        up = (model.query_rank or model.hidden) * model.query_dim
        up += (model.kv_rank - model.rope_dim) * model.kv_up_dim
        attention = model.hidden * (model.query_rank + model.kv_rank + model.value_dim) + up
    mlp = matrices * model.hidden * model.ffn
    meets = float(model.top_k) + float(model.shared_experts)
    routed = matrices * model.hidden * model.expert_ffn * meets
    mixed = float(model.mixture_layers)
    layers = float(model.layers)
    return float(
        layers * attention + (layers - mixed) * mlp + mixed * routed + model.vocab * model.hidden
    )


def _out_of_memory(row: Row) -> bool:
    """Return whether a row says that it ran out of memory."""
    columns = ("status", "mem_per_gpu_gb", "step_time_s", "tokens_per_s_per_gpu", "notes")
    text = " ".join(row.cells.get(name, "") for name in (*columns, "compile_fusion_notes"))
    return re.search(r"\boom\b|out[ -]of[ -]memory", text.lower()) is not None
