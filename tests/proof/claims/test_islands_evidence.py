"""Each island has evidence of its own: its ranks from 0 on, its samples, its oracle."""

from __future__ import annotations

from pathlib import Path

from echelon.launch.local.supervisor import RankPool
from echelon.layout.islands import island_plan
from echelon.proof.claims.claims import judge
from echelon.proof.claims.islands import IslandRun, island_evidence
from echelon.proof.oracle.batches import global_batch
from echelon.proof.run import OUR_ENGINE
from echelon.proof.shrink import shrink
from tests.proof.layouts import layout
from tests.proof.run.local_sgd import with_islands

STEPS = 2


def test_an_island_has_its_own_ranks_samples_and_oracle(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    plan = shrink(with_islands(layout(dp=2, zero={"stage": 1}, accumulation=1)), precision="fp64")
    told = {
        "plans": [plan.to_json()],
        "num_steps": [STEPS],
        "subject": OUR_ENGINE,
        "directory": str(tmp_path),
        "late": False,
    }
    labels = [plan.mesh.label(rank) for rank in range(4)]
    rank_pool.run("echelon.proof.ranks:run_subject", told, 4, labels=labels)
    run = IslandRun(plan=plan, reference=plan, num_steps=STEPS, number=0, directory=tmp_path)
    found = island_evidence(run, None)

    whole = global_batch(plan, 0).sample_ids
    share = len(whole) // 2
    for index, evidence in enumerate(found):
        assert evidence.plan == island_plan(plan, index)
        assert evidence.rounds is not None
        assert evidence.rounds.island.index == index
        assert len(evidence.run.reports(0)) == 2
        read = {i for report in evidence.run.reports(0) for i in report.samples}
        assert read == set(whole[index * share : (index + 1) * share])
        assert evidence.changed_outside(0) == ()
        assert "embedding.weight" in evidence.changed_outside(1)
        assert all(result.holds for result in judge(evidence))
    apart = [evidence.steps[0].loss for evidence in found]
    assert apart[0] != apart[1]
