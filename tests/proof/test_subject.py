"""What a subject is given and says: a rank's rows, and routes that come back from JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from types import SimpleNamespace

import torch

from echelon.proof.subject import ProofBatch, ReportedRouting
from tests.parallel.layouts import plan_of


def test_the_rows_of_all_microbatches_are_the_batch() -> None:
    plan = plan_of(dp_shard=2, microbatches=3, microbatch_sequences=2)
    inputs_BT = torch.arange(12 * 8).view(12, 8)
    batch = ProofBatch(
        sample_ids=tuple(range(100, 112)),
        inputs_BT=inputs_BT,
        labels_BT=inputs_BT + 1,
        documents=tuple((0, row % 7 + 1) for row in range(12)),
    )
    parts = [batch.microbatch(plan, rank, one) for rank in range(2) for one in range(3)]
    assert [part.sample_ids for part in parts] == [
        (start, start + 1) for start in range(100, 112, 2)
    ]
    assert torch.equal(torch.cat([part.inputs_BT for part in parts]), inputs_BT)
    assert torch.equal(parts[4].labels_BT, inputs_BT[8:10] + 1)
    assert parts[4].documents == ((0, 2), (0, 3))


def test_what_any_object_says_of_experts_is_the_same_after_json() -> None:
    said = SimpleNamespace(
        routes=[
            SimpleNamespace(
                layer=1,
                microbatch=0,
                tokens=torch.tensor([3, 9]),
                chosen=torch.tensor([[0, 2], [1, 3]]),
                kept=torch.tensor([[True, False], [True, True]]),
            )
        ],
        loads={
            1: SimpleNamespace(counts=torch.tensor([1, 1, 1, 1]), dropped=1, aux_loss=0.5, z_loss=0)
        },
        summary=SimpleNamespace(assignments=4, dropped=1, aux_loss=0.5, z_loss=0, imbalance=1),
        biases={1: torch.tensor([0.5, -0.5, 0.0, 0.0])},
        shares={1: (0.25,) * 4},
    )
    report = ReportedRouting.from_report(said)
    assert report is not None
    assert report.routes[0].kept == [[True, False], [True, True]]
    assert report.loads[1].counts == [1, 1, 1, 1]
    assert report.biases == {1: [0.5, -0.5, 0.0, 0.0]}
    assert ReportedRouting.from_json(json.loads(json.dumps(asdict(report)))) == report
    assert ReportedRouting.from_report(None) is None
    assert ReportedRouting.from_json(None) is None
