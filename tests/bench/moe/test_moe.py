"""The benchmark of a block of experts: its cases compute the same, and say what they sent."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

from bench.gpu import experts
from bench.harness.interleave import Contest, on_one_host
from bench.harness.ranks import Measurement
from bench.harness.report import rows
from bench.moe.__main__ import PARTS, agreement, cases_of, judged, read_options, table
from bench.moe.case import moe_plan
from bench.moe.spec import Variant, moe_case, moe_size, parse_size

TINY = moe_size(64, 32, 24)


def test_sizes_and_variants_are_read_as_they_are_written() -> None:
    assert parse_size(TINY.name) == TINY
    for text in ("64x32", "62x32x24", "64x30x24", "0x32x24"):
        with pytest.raises(ValueError, match=text):
            parse_size(text)
    for variant in (Variant(), Variant(maker="eager"), Variant(dispatch="two-hop", chunks=2)):
        assert Variant.parse(str(variant)) == variant
    assert [size.name for size in read_options([]).sizes_of("ranks")] == ["4096x512x1408"]
    with pytest.raises(SystemExit):
        read_options(["--parts", "nothing"])


@pytest.mark.parametrize("part", PARTS)
def test_every_case_has_a_label_and_a_plan_of_its_own(part: str) -> None:
    cases = cases_of(part, 2)
    assert len({case.label for case in cases}) == len(cases)
    for case in cases:
        settings = case.settings(TINY)
        variant, plan = Variant.parse(case.variant), moe_plan(settings)
        assert (settings.threads, plan.mesh.ep) == (case.threads, case.mode.dp)
        assert plan.layout.experts.padded == (variant.capacity_factor is not None)
        assert plan.cluster.nodes == (2 if variant.dispatch == "two-hop" else 1)


def _row(step_s: float) -> Measurement:
    return Measurement(
        step_s=step_s,
        cpu_s=step_s,
        sent_bytes=None,
        uplink_bytes=None,
        peak_bytes=0,
        first_loss=1.0,
        last_loss=1.0,
        recorded_bytes=None,
    )


def test_a_block_is_judged_beside_both_ways_and_ranks_beside_half() -> None:
    ours, grouped, eager = (case.label for case in cases_of("block", 1))
    taken = {ours: [_row(9.0)], grouped: [_row(10.0)], eager: [_row(9.0)]}
    found = {row.label: row for row in rows(taken)}
    assert [met for _, met in judged("block", 1, found)] == [True, False]
    one, two = (case.label for case in cases_of("ranks", 1))
    found = {row.label: row for row in rows({one: [_row(2.0)], two: [_row(1.1)]})}
    ((line, met),) = judged("ranks", 1, found)
    assert met
    assert "= 1.100x" in line
    assert judged("dispatch", 1, found) == []


@pytest.mark.slow
def test_blocks_over_ranks_and_of_transformers_compute_the_same(tmp_path: Path) -> None:
    cases = [
        moe_case(Variant()),
        moe_case(Variant(maker="grouped_mm")),
        moe_case(Variant(chunks=2), ranks=2),
        moe_case(Variant(dispatch="two-hop"), ranks=4),
    ]
    with contextlib.ExitStack() as stack:
        entered = Contest(logs=tmp_path, size=TINY)
        for case in cases:
            entered.enter(case, stack, on_one_host)
        assert entered.failures == {}
        for case in cases:
            entered.keep(case.label, warmup=0, steps=1)
    found = {row.label: row for row in rows(entered.rounds)}
    ((_, same),) = agreement(cases, found)
    assert same
    sent = [entered.rounds[case.label][0].recorded_bytes for case in cases]
    assert not any(sent[0].values() if sent[0] else ())
    assert set(sent[2] or ()) >= {"ep"}
    assert set(sent[3] or ()) >= {"ep_across", "ep_within"}
    lines = table("dispatch", TINY, cases, entered, found)
    assert len({line.count("|") for line in lines[2:]}) == 1


def test_the_entry_for_a_gpu_is_rehearsed_here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts.grouped_matmul, "has_grouped_kernel", lambda _: True)
    arguments = ["--device", "cpu", "--sizes", TINY.name, "--steps", "1", "--repeats", "1"]
    assert experts.main(arguments) == 0
    rows_told = [line for line in capsys.readouterr().out.splitlines() if " bf16" not in line]
    errors = [float(line.split("|")[-2]) for line in rows_told if line.startswith(("| E", "| t"))]
    assert len(errors) == 5
    # bf16 has eight bits; an expert that was left out would be seen.
    assert max(errors) < 0.05


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_it_says_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert experts.main([]) == 3
    assert "not run" in capsys.readouterr().err
