"""Every planted bug is caught, with the right tensor, the right factor and the right axis."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from echelon.core.errors import ProofFailed
from echelon.launch.pool import RankPool
from echelon.prove.run import prove
from tests.prove.layouts import BF16, FP16, layout

LAST = "layers.1"


@dataclass(frozen=True, slots=True)
class Planted:
    """Say where a bug is planted and what the prover must say of it."""

    mutant: str
    rule: str
    tensor: str
    factor: str
    axis: str = ""
    step: int = 0
    plan: dict[str, Any] = field(default_factory=dict)
    own_precision: bool = False


PLANTED = (
    Planted(
        "reductions:mean_of_means",
        "prove-gradients",
        "head.weight",
        "token ratio",
        "dp or microbatches",
        plan={"dp": 2},
    ),
    Planted(
        "reductions:last_microbatch_unscaled",
        "prove-gradients",
        "head.weight",
        "tokens",
        "microbatches",
        plan={"dp": 2},
    ),
    Planted("reductions:turned_sign", "prove-gradients", "head.weight", "sign"),
    Planted(
        "reductions:loss_is_mean_of_means",
        "prove-loss",
        "loss",
        "token ratio",
        "dp",
        plan={"dp": 2},
    ),
    Planted(
        "reductions:local_token_count",
        "prove-token-count",
        "token count",
        "token ratio of dp 0",
        "dp",
        plan={"dp": 2},
    ),
    Planted(
        "reductions:missing_all_reduce",
        "prove-gradients",
        "layers.0.mlp.down.weight",
        "missing sum",
        "dp",
        plan={"dp": 2},
    ),
    Planted(
        "reductions:doubled_all_reduce",
        "prove-gradients",
        "head.weight",
        "dp",
        "dp",
        plan={"dp": 4},
    ),
    Planted(
        "reductions:averaged_all_reduce",
        "prove-gradients",
        "head.weight",
        "1/dp",
        "dp",
        plan={"dp": 4},
    ),
    Planted(
        "reductions:wrong_group",
        "prove-gradients",
        "head.weight",
        "wrong group",
        "tp",
        plan={"dp": 2, "tp": 2},
    ),
    Planted(
        "reductions:tied_gradient_not_summed",
        "prove-gradients",
        "embedding.weight",
        "missing sum",
        "pp",
        plan={"pp": 2, "tied": True},
    ),
    Planted(
        "reductions:norm_gradient_not_summed",
        "prove-gradients",
        "norm.weight",
        "missing sum",
        "tp",
        plan={"tp": 2, "sequence_parallel": True},
    ),
    Planted(
        "reductions:column_backward_not_summed",
        "prove-gradients",
        f"{LAST}.mlp_norm.weight",
        "missing sum",
        "tp",
        plan={"tp": 2},
    ),
    Planted(
        "reductions:row_forward_doubled",
        "prove-microbatch-loss",
        "layers.0.attention.o.weight",
        "tp",
        "tp",
        plan={"tp": 4},
    ),
    Planted(
        "reductions:bias_per_rank",
        "prove-microbatch-loss",
        "layers.0.attention.o.bias",
        "tp",
        "tp",
        step=1,
        plan={"tp": 4, "model": {"output_bias": True, "mlp_bias": True}},
    ),
    Planted(
        "reductions:dropped_accumulation",
        "prove-gradients",
        "head.weight",
        "microbatches lost",
        "microbatches",
        plan={"dp": 2},
    ),
    Planted("reductions:stale_gradients", "prove-gradients", "head.weight", "stale", step=1),
    Planted(
        "reductions:stage_norm",
        "prove-gradient-norm",
        "gradient norm",
        "partial norm",
        "pp",
        plan={"pp": 2},
    ),
    Planted(
        "reductions:clip_by_local_norm",
        "prove-clipped-update",
        "embedding.weight",
        "partial norm",
        "pp",
        plan={"pp": 2},
    ),
    Planted(
        "forward:block_not_run",
        "prove-nothing-dropped",
        LAST,
        "zero",
        "pp",
        plan={"pp": 2},
    ),
    Planted("forward:block_without_effect", "prove-microbatch-loss", LAST, "zero", "pp"),
    Planted(
        "forward:initial_slice_of_the_next_rank",
        "prove-initial-weights",
        "layers.0.attention.k.weight",
        "shards permuted",
        "tp",
        step=-1,
        plan={"tp": 2},
    ),
    Planted(
        "forward:wrong_key_value_head",
        "prove-microbatch-loss",
        "layers.0.attention.k.weight",
        "wrong heads",
        "tp",
        plan={"tp": 2},
    ),
    Planted(
        "forward:padding_not_masked",
        "prove-microbatch-loss",
        "head.weight",
        "padding",
        "tp",
        plan={"tp": 2},
    ),
    Planted(
        "forward:positions_of_the_slice",
        "prove-microbatch-loss",
        "layers.0.attention.q.weight",
        "positions",
        "tp",
        plan={"tp": 2, "sequence_parallel": True},
    ),
    Planted(
        "forward:labels_in_another_order",
        "prove-microbatch-loss",
        "loss of dp 0 microbatch 0",
        "order",
        "pp",
        plan={"pp": 2, "schedule": "gpipe"},
    ),
    Planted(
        "forward:buffer_reused_in_flight",
        "prove-microbatch-loss",
        "loss of dp 0 microbatch 0",
        "stale",
        "pp",
        plan={"pp": 2, "schedule": "gpipe"},
    ),
    Planted(
        "forward:same_data_on_every_replica",
        "prove-nothing-dropped",
        "samples of rank 1",
        "same data",
        "dp",
        plan={"dp": 2},
    ),
    Planted("forward:decay_applied_twice", "prove-clipped-update", "embedding.weight", "2"),
    Planted(
        "forward:learning_rate_of_the_next_step", "prove-clipped-update", "embedding.weight", "2"
    ),
    Planted(
        "slices:slice_updated_twice",
        "prove-clipped-update",
        "layers.0.attention_norm.weight",
        "twice",
        "dp_shard",
        plan={"dp": 2, "zero": {"stage": 2}},
    ),
    Planted(
        "slices:stale_gathered_parameter",
        "prove-microbatch-loss",
        f"{LAST}.attention_norm.weight",
        "stale",
        "dp_shard",
        step=1,
        plan={"dp": 2, "zero": {"stage": 3}},
    ),
    Planted(
        "slices:overflow_seen_on_one_rank",
        "prove-loss-scale",
        "loss scale",
        "overflow not agreed",
        "dp_shard",
        step=1,
        plan={"dp": 2, "zero": {"stage": 3}, "precision": FP16},
    ),
    Planted(
        "slices:replicas_not_summed",
        "prove-gradients",
        "head.weight",
        "missing sum",
        "dp_replicate",
        plan={"dp": 4, "zero": {"stage": 2}, "mesh": {"dp_replicate": 2, "dp_shard": 2}},
    ),
    Planted(
        "slices:norm_of_own_slices",
        "prove-gradient-norm",
        "gradient norm",
        "partial norm",
        "dp_shard",
        plan={"dp": 2, "zero": {"stage": 1}},
    ),
    Planted(
        "slices:master_not_written_back",
        "prove-master-weights",
        "layers.0.attention_norm.weight",
        "stale",
        "dp_shard",
        plan={"dp": 2, "zero": {"stage": 1}, "precision": BF16},
        own_precision=True,
    ),
    Planted(
        "pipelines:w_before_its_b_unseen",
        "prove-gradients",
        "layers.0.mlp.down.weight",
        "microbatches lost",
        "microbatches",
        plan={"pp": 2, "schedule": "zb-h1"},
    ),
    Planted(
        "pipelines:w_dropped",
        "prove-gradients",
        "layers.0.mlp.down.weight",
        "microbatches lost",
        "microbatches",
        plan={"pp": 2, "schedule": "zb-h1"},
    ),
    Planted(
        "pipelines:gradients_swapped",
        "prove-gradients",
        "layers.0.mlp.down.weight",
        "order",
        "pp",
        plan={"pp": 2},
    ),
    Planted(
        "pipelines:mirror_sum_missing",
        "prove-gradients",
        "head.weight",
        "missing sum",
        "pp",
        plan={"pp": 2, "schedule": "dualpipe", "accumulation": 4},
    ),
    Planted(
        "pipelines:mirror_sum_twice",
        "prove-gradients",
        "head.weight",
        "pp",
        "pp or microbatches",
        plan={"pp": 2, "schedule": "dualpipe", "accumulation": 4},
    ),
    Planted(
        "pipelines:tied_gradient_twice",
        "prove-gradients",
        "embedding.weight",
        "pp",
        "pp",
        plan={"pp": 2, "tied": True},
    ),
)


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.mutant)
def test_a_planted_bug_is_caught_and_named(planted: Planted, rank_pool: RankPool) -> None:
    proof = prove(
        layout(**planted.plan),
        run_ranks=rank_pool.run,
        subject=f"tests.prove.mutants.{planted.mutant}",
        own_precision=planted.own_precision,
    )

    assert not proof.proven
    found = proof.diagnosis
    assert found is not None
    told = (found.rule, found.tensor, found.factor, found.axis, found.step)
    wanted = (planted.rule, planted.tensor, planted.factor, planted.axis, planted.step)
    assert told == wanted, found.sentence()
    with pytest.raises(ProofFailed) as failed:
        proof.require()
    assert planted.rule in failed.value.rules
    assert found.sentence() in str(failed.value)


def test_at_least_twenty_bugs_are_planted() -> None:
    assert len({planted.mutant for planted in PLANTED}) >= 20
