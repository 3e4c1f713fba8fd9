# SPDX-License-Identifier: Apache-2.0
"""Where a published guide was wrong: the errata, as lessons show them."""

from __future__ import annotations

from echelon.handbook.errata.claims import PublishedClaim, all_claims
from echelon.page.lessons.lesson import Correction

_WORDS = {
    "opt_states": "optimizer state",
    "grads_opt": "gradients and optimizer state",
    "total": "all states",
    "tp_only_MB": "MB with tensor parallelism alone",
    "tp_sp_MB": "MB with sequence parallelism beside it",
    "no_tp_MB": "MB without either",
    "vs_tf32": "against TF32",
    "vs_fp32": "against fp32",
    "overhead_vs_ideal": "idle over busy",
    "fraction_of_total": "idle over all",
    "overhead": "idle over busy",
    "fraction": "idle over all",
    "sim_overhead": "idle over busy, simulated",
    "sim_fraction": "idle over all, simulated",
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "gpipe_backward_2x": "GPipe with backward of twice the time",
    "1f1b_backward_2x": "1F1B with backward of twice the time",
    "backward_1x": "slots where backward takes one",
    "backward_2x": "slots where it takes two",
    "gpipe_M32": "GPipe at M = 32",
    "1f1b_M8": "1F1B at M = 8",
    "1f1b_M32": "1F1B at M = 32",
    "gpipe_total": "GPipe, all ranks",
    "1f1b_total": "1F1B, all ranks",
    "1f1b_most": "1F1B, the fullest rank",
    "peak_ratio": "fullest rank against fullest rank",
    "sum_ratio": "all ranks against all ranks",
    "total_B": "billions stored",
    "redundant_B": "billions stored again",
    "redundant_over_useful": "again, times the model",
    "total_over_useful": "stored, times the model",
    "a2a_messages": "messages of an all-to-all",
    "ring_allgather_messages": "of a ring all-gather",
    "ring_allreduce_messages": "of a ring all-reduce",
    "a2a_volume": "volume of an all-to-all",
    "allreduce_volume": "of an all-reduce",
    "a_rank_sends_GB": "GB that a rank sends",
    "all_send_GB": "GB that all send",
    "with_backward_GB": "GB of a rank with backward",
    "ms_at_300_GBps": "ms at 300 GB/s",
    "ms_at_25_GBps": "ms at 25 GB/s",
    "master_m_v_over_fp16": "copy and moments over 16-bit parameters",
    "master_m_v_over_fp32": "copy and moments over fp32 parameters",
    "m_v_over_fp32": "moments over fp32 parameters",
    "KV_GB": "GB of keys and values",
    "with_weights_GB": "GB with the weights",
    "per_layer_GiB": "GiB of a layer",
    "total_GiB": "GiB of all layers",
    "total_GB": "GB of all layers",
    "with_8_of_64_kv_heads_GiB": "GiB with 8 of 64 key heads",
    "per_gpu_all_layers": "a device, all layers",
    "per_gpu_per_layer": "a device, one layer",
    "A100_total_bidir": "A100, both directions",
    "A100_per_direction": "A100, one direction",
    "H100_total": "H100, both directions",
    "B200_total": "B200, both directions",
    "ZeRO1": "ZeRO 1",
    "ZeRO2": "ZeRO 2",
    "ZeRO3": "ZeRO 3",
    "zero1": "with ZeRO 1",
    "no_zero": "without ZeRO",
    "double_buffered_overlap": "overlapped",
    "volume_psi": "psi sent",
    "full": "blocks without a mask",
    "causal": "with a causal mask",
    "causal_work_per_rank": "blocks of each rank then",
}
"""Names of values in the errata that are no words."""


def corrections(*ids: str) -> tuple[Correction, ...]:
    """Return the corrections of claims by their ids; KeyError for an id that is no claim's."""
    known = {claim.id: claim for claim in all_claims()}
    return tuple(correction_of(known[claim]) for claim in ids)


def correction_of(claim: PublishedClaim) -> Correction:
    """Return what a claim says and what holds, in words."""
    return Correction(id=claim.id, said=_said(claim), holds=_holds(claim))


def _said(claim: PublishedClaim) -> str:
    """Return what the guide says; a value that its sentence has is not told again."""
    value = "" if claim.said is None else value_text(claim.said)
    return f"{claim.claim}: {value}" if value.lower() not in claim.claim.lower() else claim.claim


def _holds(claim: PublishedClaim) -> str:
    value = value_text(claim.holds)
    if claim.verdict == "ok":
        return f"that is right. {claim.why}".rstrip()
    if not claim.why:
        return value
    if isinstance(claim.holds, dict):
        return f"{claim.why} In numbers: {value}."
    # A number with a full stop behind it would be read as that of a list.
    stop = "." if isinstance(claim.holds, str) else ":"
    return f"{value}{stop} {claim.why}"


def value_text(value: object) -> str:
    """Return a value of a claim for people: its names as words, its parts one by one."""
    if isinstance(value, dict):
        return "; ".join(_named(str(name), one) for name, one in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(value_text, value))
    if isinstance(value, (int, float)):
        return f"{value:,}".removesuffix(".0")
    return str(value)


def _named(name: str, value: object) -> str:
    if isinstance(value, dict):
        parts = (_named(str(inner), one) for inner, one in value.items())
        return f"{_name(name)}: {', '.join(parts)}"
    return f"{_name(name)} = {value_text(value)}"


def _name(name: str) -> str:
    return _WORDS.get(name, name.replace("_", " "))
