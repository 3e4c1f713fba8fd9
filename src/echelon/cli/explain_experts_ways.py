"""The part of `echelon explain experts` that needs no run: what there is to choose, with sources.

Numbers are those of `cost/`, of shapes that are presets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from textwrap import wrap
from typing import Any

from echelon.config.load import load_job
from echelon.core.experts import Balance
from echelon.core.parameters import num_active_parameters, num_parameters
from echelon.core.units import decimal_bytes, short_count
from echelon.cost.collectives import all_to_all_bytes
from echelon.cost.expert_load import most_nodes

PUBLISHED = "deepseek-v3"
NODES = 8
TOKENS, HIDDEN, TOP_K, RANKS, BF16 = 4096, 7168, 8, 8, 2
FACTOR = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Say what one setting of experts takes, what that means, and where it comes from."""

    setting: str
    means: str
    source: str


CHOICES: dict[str, tuple[Choice, ...]] = {
    "Routers: which experts a token meets, and with which gates": (
        Choice(
            setting='router = "softmax", renormalise = false',
            means="gates are probabilities over all E experts, as they are",
            source="Switch Transformers, 2021, section 2.1, with k = 1",
        ),
        Choice(
            setting='router = "softmax", renormalise = true',
            means="gates of the k chosen add up to 1; with k = 1 every gate is 1, and the loss has "
            "no gradient for the router",
            source="Mixtral, 2024, section 2.1, with k = 2",
        ),
        Choice(
            setting='router = "sigmoid", renormalise = true, gate_scale',
            means="each score for itself; gates of the chosen add up to gate_scale",
            source="DeepSeek-V3, 2024, section 2.1.2",
        ),
        Choice(
            setting="groups, top_groups",
            means="experts come out of the best groups only: with a group to a node, a token goes "
            "to top_groups nodes at most",
            source="DeepSeek-V3, 2024, section 2.1.2",
        ),
    ),
    "Balance: what evens the load": (
        Choice(
            setting='balance = "aux"',
            means="aux_coefficient x E x sum of f P is added to the loss of each layer: it evens "
            "by gradients, beside those of the loss",
            source="Switch Transformers, 2021, section 2.2",
        ),
        Choice(
            setting='balance = "bias"',
            means="a bias takes part in the choice, never in the gates, and moves by bias_rate "
            "against the load of the global batch after each step: no gradient is touched",
            source="Wang et al., 2024; DeepSeek-V3, section 2.1.2",
        ),
        Choice(
            setting='balance = "both"',
            means="the bias over steps, a small auxiliary loss over each sequence "
            '(aux_over = "sequence")',
            source="DeepSeek-V3, 2024, section 2.1.2",
        ),
        Choice(
            setting="z_coefficient",
            means="keeps logits small: the mean square of their log-sum-exp is added to the loss",
            source="ST-MoE, 2022",
        ),
    ),
    "Capacity: what becomes of tokens when an expert is asked for by many": (
        Choice(
            setting='capacity_factor = "dropless"',
            means="all are computed; how many rows arrive follows from the routing",
            source="MegaBlocks, 2022",
        ),
        Choice(
            setting="capacity_factor = c",
            means="room for ceil(c T k / E) tokens of each sequence of T; the rest pass by the "
            'residual alone: later ones (drop = "position") or those of lower gates ("score")',
            source="GShard, 2020, section 2.2",
        ),
        Choice(
            setting="padded = true",
            means="as many rows to every expert, full or not: no size changes from step to step",
            source="GShard, 2020, section 2.2",
        ),
    ),
    "Dispatch: how tokens travel to the ranks of their experts": (
        Choice(
            setting='dispatch = "flat"',
            means="a row for each expert that a token meets elsewhere, straight to its rank",
            source="GShard, 2020, section 2.2",
        ),
        Choice(
            setting='dispatch = "two-hop"',
            means="a row for each node that a token reaches, handed on inside of it: fewer rows on "
            "slow links where a token meets several experts of a node",
            source="DeepSeek-V3, 2024, section 3.2.2",
        ),
        Choice(
            setting="chunks = n",
            means="one part of the rows travels while another is computed",
            source="Tutel, 2022",
        ),
    ),
    "Axes: which ranks share out the experts": (
        Choice(
            setting="mesh.ep, experts.expert_tp = 1",
            means="experts are whole; ep is folded over dp_shard x cp x tp, and tensor ranks share "
            "out the tokens: matrices stay wide, and a row is dispatched once",
            source="MoE Parallel Folding, 2025",
        ),
        Choice(
            setting="mesh.ep, experts.expert_tp = tp",
            means="experts are cut like a dense MLP; ep is folded over dp_shard x cp, and every "
            "piece needs every row: for experts that are too large for a rank",
            source="Singh et al., 2023",
        ),
        Choice(
            setting="mesh.dp_replicate",
            means="holds copies and is no part of it; ranks with the same experts sum their "
            "gradients, and share them out by experts.zero_stage",
            source="Rajbhandari et al., DeepSpeed-MoE, 2022",
        ),
    ),
}
"""The settings, by what they are about."""


def ways_json() -> dict[str, Any]:
    """Return the settings and the facts as JSON values."""
    shape = load_job(PUBLISHED).plan.model
    experts = shape.experts
    assert experts is not None
    elements = 2 * TOKENS * HIDDEN * TOP_K
    return {
        "ways": {title: [asdict(one) for one in found] for title, found in CHOICES.items()},
        "facts": {
            "elements": elements,
            "sent_forward_bytes": all_to_all_bytes(elements * BF16, RANKS),
            "num_parameters": num_parameters(shape),
            "num_active_parameters": num_active_parameters(shape),
            "most_nodes": most_nodes(experts, NODES),
            "room": Balance(capacity_factor=FACTOR).capacity(
                TOKENS, experts.num_experts, experts.top_k
            ),
        },
    }


def ways_text() -> str:
    """Return the page without a run."""
    parts = [
        "Mixtures of experts: a router gives each token k of E experts. Expert parallelism shares\n"
        "out the experts of a block among ep ranks, and tokens travel to them: no ranks are\n"
        "added, for ep is folded over ranks that there are.",
        *(f"{title}\n\n" + "\n".join(_lines(found)) for title, found in CHOICES.items()),
        "Some numbers\n\n" + "\n".join(_facts()),
        "For your own run: echelon explain experts RUN --set mesh.ep=4",
    ]
    return "\n\n".join(parts) + "\n"


def _lines(choices: tuple[Choice, ...]) -> Iterator[str]:
    for one in choices:
        yield f"  {one.setting}"
        yield from _wrapped(f"{one.means}. Source: {one.source}")


def _wrapped(text: str) -> Iterator[str]:
    yield from (f"      {line}" for line in wrap(text, 92, break_on_hyphens=False))


def _facts() -> Iterator[str]:
    facts = ways_json()["facts"]
    each, active, whole = (
        facts[name] for name in ("sent_forward_bytes", "num_active_parameters", "num_parameters")
    )
    yield f"  {TOKENS} tokens of width {HIDDEN}, k = {TOP_K}, balanced over {RANKS} ranks: there"
    yield f"  and back 2 N k D = {facts['elements']:,} elements, in bf16 twice as many bytes, of"
    yield f"  which {RANKS - 1}/{RANKS} leave: {each:,} bytes = {decimal_bytes(each)} forward."
    yield "  Two all-to-alls forward, two backward of the same rows: backward sends as much again."
    yield f"  DeepSeek-V3: a token meets {short_count(active)} of {short_count(whole)} parameters."
    most = facts["most_nodes"]
    yield f"  It was trained with ep = 64 over {NODES} nodes, a token on {most} of them at most,"
    yield "  pp = 16, ZeRO stage 1 and no tensor parallelism (its report, 2024, 2.1.2 and 3.2)."
    yield f"  With a capacity factor of {FACTOR}, which it does not have, one of its experts"
    yield f"  would have room for ceil({FACTOR} x {TOKENS} x 8 / 256) = {facts['room']} tokens of a"
    yield f"  sequence of {TOKENS}."
