"""Every number of a plan's document has a class, and a wrong one ends `echelon plan`, by name."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from echelon.cli.main import main
from echelon.config.load import load_job
from echelon.core.errors import ProofFailed
from echelon.core.model_shape import ModelShape
from echelon.cost.seconds.from_plan import peak_flops
from echelon.cost.seconds.kernels import model_flops_per_token
from echelon.models.decoder import Decoder
from echelon.page.documents import plan as page
from echelon.page.documents.plan import plan_page
from echelon.planner.answer import search_json
from echelon.planner.predict.estimate import Estimate
from echelon.planner.report import estimate, head, memory, pipeline, report, sent
from echelon.planner.report.printed_numbers import require_agreement, require_page
from echelon.planner.report.report import plan_json
from echelon.proof.claims.claims import CLAIMS
from echelon.rehearsal.run import rehearse
from echelon.schedule import check, simulate
from echelon.schedule.action import Action, ActionKind, Schedule
from tests.planner.report.number_classes import NUMBERS, Known, class_of, leaves

ROOT = Path(__file__).parents[3]
TWO_NODES = f"cluster.file={ROOT / 'examples' / 'two-nodes.toml'}"
EXPERTS = ("model.experts.num_experts=4", "model.experts.top_k=2", "model.experts.ffn=96")
FP8 = (
    *("model.hidden=256", "model.ffn=512", "model.heads=4", "model.kv_heads=2"),
    *("model.head_dim=64", "precision.parameters=bf16", "precision.matmul=fp8"),
)
PLANS: dict[str, tuple[str, ...]] = {
    "dense": (TWO_NODES, "mesh.dp_replicate=4"),
    "muon": ("mesh.dp_shard=2", "zero.stage=1", "optimizer.kind=muon"),
    "experts": (*EXPERTS, "mesh.dp_shard=2", "mesh.ep=2", "experts.capacity_factor=1.0"),
    "zb-h1": ("mesh.pp=2", "pipeline.schedule=zb-h1"),
    "zero 3 and offload": (
        *("mesh.dp_shard=2", "zero.stage=3", "zero.optimizer_offload=host"),
        "zero.parameter_offload=host",
    ),
    "context": ("mesh.cp=2", "context.kind=ring"),
    "lora": ("lora.rank=4", "mesh.tp=2"),
    "fp8": (*FP8, "mesh.dp_shard=2", "zero.stage=3"),
    "servers": ("servers.count=1", "mesh.dp_replicate=2", "zero.stage=0"),
}


RARE = {
    "assumed[]",
    *("search.pins.*", "search.refused.*", "search.plans[].recompute_operators[]"),
    *("search.plans[].stages[][]", "search.plans[].plan"),
    *("recommended.others[].fits", "recommended.others[].preferred_for[]"),
    *("recommended.expected.*", "recommended.longest_sequence.*", "recommended.without_host.*"),
}
"""Leaves of other questions than the ones here."""


@cache
def document(name: str) -> str:
    return json.dumps(plan_json(load_job("nano", PLANS[name]).plan))


@cache
def answer() -> str:
    """Return the document of a search with prices."""
    words = ["plan", "nano", "--cluster", "2xh100", "--price", "2.5", "--why", "--json"]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(words) == 0
    return out.getvalue()


def documents() -> Mapping[str, dict[str, Any]]:
    runs = {name: json.loads(document(name)) for name in PLANS}
    return runs | {"search": json.loads(answer())}


def test_every_leaf_has_a_class_and_every_class_a_leaf() -> None:
    paths = {path for doc in documents().values() for path, _ in leaves(doc)}
    assert [path for path in sorted(paths) if class_of(path) is None] == []
    used = {class_of(path) for path in paths}
    unused = {number.path for number in NUMBERS if number not in used}
    assert unused <= RARE


def test_a_number_without_a_class_is_seen() -> None:
    paths = ("estimate.colour", "recommended.colour", "stages[].held[].colour", "sizes[].colour")
    assert [class_of(path) for path in paths] == [None] * 4
    assert class_of("stages[].held[].bytes") is not None


def test_what_compares_a_number_is_there() -> None:
    rules = {claim.rule.id for claim in CLAIMS}
    rehearsal = rehearse(load_job("nano", PLANS["zb-h1"]).plan, workers=1)
    names = {number.name for number in rehearsal.numbers}
    for number in NUMBERS:
        if number.known is Known.PROVED:
            assert number.by in rules, number
        if number.known is Known.REHEARSED:
            first, _, last = number.by.partition("*")
            assert any(n.startswith(first) and n.endswith(last) for n in names), number
        if number.known is Known.TESTED:
            file, _, function = number.by.partition("::")
            assert f"def {function}" in (ROOT / file).read_text(encoding="utf-8"), number


@pytest.mark.parametrize("name", PLANS)
def test_a_right_document_agrees_with_itself_and_its_page(name: str) -> None:
    doc = json.loads(document(name))
    require_agreement(doc)
    require_page(plan_page(load_job("nano", PLANS[name]).plan), doc)


Change = Callable[[dict[str, Any]], None]


def _term_left_out(doc: dict[str, Any]) -> None:
    del doc["estimate"]["bytes"]["buffers"]


def _far_more_than_sent(doc: dict[str, Any]) -> None:
    term = doc["stages"][0]["sent_bytes_per_step"][0]
    term["far"] = 2 * term["each"] + 1


def _one_count_more(doc: dict[str, Any]) -> None:
    doc["stages"][0]["sent_bytes_per_step"][0]["count"] += 1


def _one_element_more(doc: dict[str, Any]) -> None:
    doc["stages"][0]["held"][0]["bytes"] += 4


def _rank_twice(doc: dict[str, Any]) -> None:
    axis = next(iter(doc["groups"]))
    doc["groups"][axis][0][0] = doc["groups"][axis][0][1]


def _rate_of_one_device(doc: dict[str, Any]) -> None:
    doc["estimate"]["tokens_per_s_per_device"] *= 2


def _bubble_of_another(doc: dict[str, Any]) -> None:
    doc["pipeline"]["timing"]["bubble_fraction_with_transfers"] *= 0.9


def _microbatch_less(doc: dict[str, Any]) -> None:
    doc["num_microbatches"] -= 1


CHANGES: dict[str, tuple[str, Change, str]] = {
    "a term of memory is left out": ("dense", _term_left_out, "estimate.held_bytes"),
    "more leaves the node than is sent": ("dense", _far_more_than_sent, "far"),
    "a count is off by one": ("dense", _one_count_more, "stages[0].sent"),
    "an element more": ("dense", _one_element_more, "stages[0].held"),
    "a rank is in a group twice": ("dense", _rank_twice, "groups."),
    "a rate is of half the devices": ("dense", _rate_of_one_device, "tokens_per_s_per_device"),
    "an older bubble": ("zb-h1", _bubble_of_another, "bubble_fraction_with_transfers"),
    "a microbatch less": ("zb-h1", _microbatch_less, "num_microbatches"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_number_is_named(change: str) -> None:
    name, make, path = CHANGES[change]
    doc = json.loads(document(name))
    make(doc)
    with pytest.raises(ProofFailed) as failed:
        require_agreement(doc)
    assert set(failed.value.rules) == {"plan-numbers-agree"}
    assert path in str(failed.value)


def _no_idle_devices(patch: pytest.MonkeyPatch) -> None:
    right = search_json.price_json

    def of_used(request: Any, estimate: Estimate) -> dict[str, Any]:
        prices = right(request, estimate)
        return prices | {"price_with_idle_devices": prices["price_of_a_million_tokens"]}

    patch.setattr(search_json, "price_json", of_used)


def _price_of_one_device(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Estimate, "token_price", lambda self, price: 1e6 * price * self.step_s / 3600.0)


def _price_for_a_minute(patch: pytest.MonkeyPatch) -> None:
    right = Estimate.token_price
    patch.setattr(Estimate, "token_price", lambda self, price: 60.0 * right(self, price))


PRICES = {
    "without the idle devices": (_no_idle_devices, "price_with_idle_devices"),
    "of one device": (_price_of_one_device, "price_of_a_million_tokens"),
    "of minutes": (_price_for_a_minute, "price_of_a_million_tokens"),
}


@pytest.mark.parametrize("mistake", PRICES)
def test_a_wrong_price_ends_a_search(
    mistake: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant, path = PRICES[mistake]
    plant(monkeypatch)
    words = ["plan", "nano", "--cluster", "4xh100", "--pin", "devices=2", "--price", "2.5"]
    assert main([*words, "--json"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "plan-numbers-agree" in printed
    assert path in printed


def _stale_estimate(patch: pytest.MonkeyPatch) -> None:
    right = page.estimate_plan

    def older(*given: Any) -> Estimate:
        estimate = right(*given)
        seconds = {**estimate.seconds, "matmul": 2 * estimate.seconds["matmul"]}
        return replace(estimate, seconds=seconds)

    patch.setattr(page, "estimate_plan", older)


def _stale_bytes(patch: pytest.MonkeyPatch) -> None:
    right = sent.sent_by_axis
    patch.setattr(
        sent, "sent_by_axis", lambda row: {axis: size + 1 for axis, size in right(row).items()}
    )


def _stale_memory(patch: pytest.MonkeyPatch) -> None:
    right = memory.binary_bytes
    patch.setattr(memory, "binary_bytes", lambda size: right(1.1 * size))


def _stale_schedule(patch: pytest.MonkeyPatch) -> None:
    right = page.stage_durations
    patch.setattr(page, "stage_durations", lambda *given: right(*given).without_transfers())


PAGES = {
    "an older estimate": (_stale_estimate, "estimate.step_s", "dense"),
    "older bytes": (_stale_bytes, "sent_bytes_by_axis.dp", "dense"),
    "older memory": (_stale_memory, "held.parameters", "dense"),
    "an older schedule": (_stale_schedule, "pipeline.timing.makespan_s", "zb-h1"),
}


@pytest.mark.parametrize("mistake", PAGES)
def test_a_stale_number_of_a_page_ends_the_plan(
    mistake: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plant, path, name = PAGES[mistake]
    plant(monkeypatch)
    file = tmp_path / "plan.html"
    flags = [word for setting in PLANS[name] for word in ("--set", setting)]
    assert main(["plan", "nano", *flags, "--out", str(file)]) == 1
    printed = " ".join(capsys.readouterr().err.split())
    assert "error[plan-numbers-agree]" in printed
    assert path in printed
    assert not file.exists()


def _causal_mfu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Estimate, "mfu", property(lambda s: s.causal_flops / (s.step_s * s.devices * s.peak_flops))
    )


def _tied_head_twice(patch: pytest.MonkeyPatch) -> None:
    right = report.num_parameters
    patch.setattr(report, "num_parameters", lambda model: right(model) + model.vocab * model.hidden)


def _all_routers_active(patch: pytest.MonkeyPatch) -> None:
    right = head.num_active_parameters
    patch.setattr(head, "num_active_parameters", lambda model: right(model) + model.hidden)


def _room_rounded_down(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(head, "_capacity", lambda plan, experts: 63)


def _scores_of_all_heads(patch: pytest.MonkeyPatch) -> None:
    right = report.scores_by_rank
    patch.setattr(report, "scores_by_rank", lambda plan: [2 * n for n in right(plan)])


def _freed_after_b(patch: pytest.MonkeyPatch) -> None:
    right = check._held

    def early(actions: Sequence[Action]) -> list[int]:
        kinds = {ActionKind.B: ActionKind.W, ActionKind.W: ActionKind.B}
        return right([replace(one, kind=kinds.get(one.kind, one.kind)) for one in actions])

    patch.setattr(check, "_held", early)


def _bubble_of_the_first_rank(patch: pytest.MonkeyPatch) -> None:
    of_first = property(lambda one: one.idle_s[0] / one.makespan_s)
    patch.setattr(simulate.Simulation, "bubble_fraction", of_first)


def _bubble_of_the_work(patch: pytest.MonkeyPatch) -> None:
    of_work = property(lambda one: one.bubble_overhead)
    patch.setattr(simulate.Simulation, "bubble_fraction", of_work)


def _makespan_of_the_last_rank(patch: pytest.MonkeyPatch) -> None:
    right = pipeline.simulate

    def until_the_last(schedule: Schedule, durations: simulate.Durations) -> simulate.Simulation:
        found = right(schedule, durations)
        own = (one.end for one in found.events if one.rank == schedule.num_ranks - 1)
        return replace(found, makespan_s=max(own))

    patch.setattr(pipeline, "simulate", until_the_last)


def _memory_in_another_unit(patch: pytest.MonkeyPatch) -> None:
    right = estimate.held_unit
    patch.setattr(estimate, "held_unit", lambda one: (1000 * 1000, right(one)[1]))


def _messages_in_another_unit(patch: pytest.MonkeyPatch) -> None:
    right = sent.decimal_bytes
    patch.setattr(sent, "decimal_bytes", lambda size: right(1.024 * size))


COMMANDS = {
    "mfu without masked pairs": (_causal_mfu, "estimate.mfu", "dense"),
    "a tied head twice": (_tied_head_twice, "num_parameters", "dense"),
    "a router too many": (_all_routers_active, "num_active_parameters", "experts"),
    "a room rounded down": (_room_rounded_down, "experts.capacity", "experts"),
    "scores of all heads": (_scores_of_all_heads, "context.scores_by_rank", "context"),
    "freed after B": (_freed_after_b, "peak_in_flight_of_rank[1]", "zb-h1"),
    "the first rank's bubble": (_bubble_of_the_first_rank, "bubble_fraction", "zb-h1"),
    "the last rank's makespan": (_makespan_of_the_last_rank, "makespan", "zb-h1"),
    "memory in MB": (_memory_in_another_unit, "estimate.held_bytes", "dense"),
    "messages in KiB": (_messages_in_another_unit, "sent_bytes_by_axis.dp", "dense"),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("mistake", COMMANDS)
def test_a_wrong_number_ends_the_plan_as_text(
    mistake: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plant, path, name = COMMANDS[mistake]
    plant(monkeypatch)
    flags = [word for one in PLANS[name] for word in ("--set", one)]
    assert main(["plan", "nano", *flags]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "error[plan-numbers-agree]" in said
    assert path in said


@pytest.mark.parametrize(
    ("plant", "path"),
    [(_freed_after_b, "peak_in_flight_per_rank[1]"), (_bubble_of_the_work, "bubble_fraction")],
)
def test_a_wrong_count_ends_a_drawn_schedule(
    plant: Callable[[pytest.MonkeyPatch], None],
    path: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plant(monkeypatch)
    words = ["--pp", "3", "--microbatches", "4", "--slots", "1,1,1,1"]
    assert main(["schedule", "show", "zb-h1", *words]) == 1
    said = capsys.readouterr().err
    assert f"error[plan-numbers-agree]: {path}" in said


def test_the_page_of_another_trainer_has_its_numbers(tmp_path: Path) -> None:
    """The page once had the numbers of our trainer."""
    file = tmp_path / "plan.html"
    words = ["plan", "gpt2", "--cluster", "2xh100", "--trainer", "megatron", "--out", str(file)]
    assert main(words) == 0
    assert file.exists()


def test_idle_devices_are_in_the_price(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "nano", "--cluster", "4xh100", "--pin", "devices=2", "--price", "2.5"]
    assert main(words) == 0
    assert "with 2 idle devices" in " ".join(capsys.readouterr().out.split())
    assert main([*words, "--json"]) == 0
    choice = json.loads(capsys.readouterr().out)["recommended"]
    used, every = choice["price_of_a_million_tokens"], choice["price_with_idle_devices"]
    assert every == pytest.approx(2 * used)


def test_a_term_that_json_leaves_out_ends_the_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = report.estimate_json

    def without(estimate: Estimate) -> dict[str, Any]:
        numbers = right(estimate)
        del numbers["bytes"]["activations"]
        return numbers

    monkeypatch.setattr(report, "estimate_json", without)
    assert main(["plan", "nano", "--json"]) == 1
    assert "estimate.held_bytes" in capsys.readouterr().out


def test_parameters_are_those_of_the_model() -> None:
    """The modules of one process have as many numbers."""
    plan = load_job("nano", ()).plan
    modules = Decoder(plan.model)
    count = sum(parameter.numel() for parameter in modules.parameters())
    assert json.loads(document("dense"))["num_parameters"] == count


def test_scores_are_pairs_of_the_mask() -> None:
    doc = json.loads(document("context"))
    numbers = doc["plan"]["mathematics"]
    length = numbers["sequence_length"]
    heads, sequences = numbers["model"]["heads"], doc["plan"]["layout"]["microbatch_sequences"]
    pairs = heads * sequences * length * (length + 1) // 2
    assert sum(doc["context"]["scores_by_rank"]) == pairs


def _flops(model: ModelShape, length: int, pairs: float) -> float:
    """FLOPs of a token by hand: six for each weight, twelve for each pair and width."""
    kv, queries = model.kv_heads * model.head_dim, model.heads * model.head_dim
    attention = model.hidden * (2 * queries + 2 * kv)
    mlp = (3 if model.gated else 2) * model.hidden * model.ffn
    norms = (2 * model.layers + 1) * model.hidden
    weights = model.layers * (attention + mlp) + model.vocab * model.hidden + norms
    return 6 * weights + 12 * model.layers * queries * pairs


def test_mfu_by_hand() -> None:
    plan = load_job("nano", ()).plan
    doc, length = plan_json(plan)["estimate"], plan.mathematics.sequence_length
    flops = _flops(plan.model, length, length)
    assert model_flops_per_token(plan.model, length, causal=False) == pytest.approx(flops)
    peak = peak_flops(plan.cluster, plan.mathematics.precision.parameters)
    assert doc["mfu"] == pytest.approx(flops * doc["tokens_per_s_per_device"] / peak)
    causal = _flops(plan.model, length, (length + 1) / 2)
    assert doc["causal_mfu"] == pytest.approx(doc["mfu"] * causal / flops, rel=1e-3)
    assert class_of("estimate.mfu") is not None
