"""Exports hold as others read them; a tensor that is exported or imported wrongly is named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch

from echelon.core.model_shape import Lora, ModelShape
from echelon.core.plan import Plan
from echelon.launch.local.supervisor import RankPool
from echelon.proof.claims.claims import ClaimResult
from echelon.proof.shrink import shrink
from echelon.proof.whole_run import whole_run
from echelon.proof.whole_run.exported import (
    Export,
    RunExports,
    exports_of,
    has_own_layout,
    how_it_differs,
    own_weights,
    read_tensors,
    why_not_read,
)
from echelon.proof.whole_run.whole_run import OUR_TRAINER, whole_run_pass
from tests.parallel.layouts import GPT2, NANO
from tests.proof.independent.hugging_face.test_beside import FAMILIES
from tests.proof.layouts import Changes, layout
from tests.proof.whole_run.wrong_exporters import names_with_pairs
from tests.training.weights.transformers_models import DEEPSEEK, MIXTRAL

WRONG = "tests.proof.whole_run.wrong_exporters"
LORA: Changes = {"lora": Lora(rank=2, alpha=8.0, targets=("q", "v", "down"))}
MODELS: Mapping[str, Changes] = {
    "llama": {},
    "lora": LORA,
    "gpt2": FAMILIES["GPT2LMHeadModel"],
}


def plan_of(model: Changes) -> Plan:
    return shrink(layout(model=model), precision="fp64")


class TrainedRuns:
    """Hold a whole run of each model up to its export, which tests repeat with bugs."""

    def __init__(self, pool: RankPool, folder: Path) -> None:
        self._pool, self._folder = pool, folder
        self._runs: dict[str, tuple[dict[str, Any], RunExports]] = {}

    def export(self, model: str, target: str) -> tuple[ClaimResult, ...]:
        """Export the run of a model by a target of one rank, and return the claims about it."""
        if model not in self._runs:
            self._train(model)
        argument, run = self._runs[model]
        copy = self._folder / f"{model}-{target.rpartition(':')[2]}"
        copytree(run.folder, copy)
        self._pool.run(target, {**argument, "folder": str(copy)}, 1, labels=[""])
        return replace(run, folder=copy).claims()

    def _train(self, model: str) -> None:
        saved = self._folder / model
        given: list[dict[str, Any]] = []

        def run_ranks(target: str, argument: Any, count: int, **named: Any) -> None:
            if target == OUR_TRAINER.export:
                copytree(argument["folder"], saved)
                given.append(argument)
            self._pool.run(target, argument, count, **named)

        made: list[RunExports] = []
        with pytest.MonkeyPatch.context() as patch:

            def held(**fields: Any) -> RunExports:
                made.append(RunExports(**fields))
                return made[-1]

            patch.setattr(whole_run, "RunExports", held)
            result = whole_run_pass(plan_of(MODELS[model]), run_ranks=run_ranks, exported_in="bf16")
        assert [claim.holds for claim in result.claims] == [True] * 7, result.diagnosis
        self._runs[model] = given[0], replace(made[0], folder=saved)


@pytest.fixture(scope="module")
def trained(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> TrainedRuns:
    return TrainedRuns(rank_pool, tmp_path_factory.mktemp("trained"))


BUGS = (
    (
        *("llama", "rotary_pairs_side_by_side", "prove-trainer-export"),
        "hf of llama: model.layers.1.self_attn.q_proj.weight",
        "its rows are in another order: row 1 is row 3 of the right one",
    ),
    (
        *("llama", "gate_and_what_it_gates_change_places", "prove-trainer-export"),
        "dcp: layers.0.mlp.gate.weight",
        "rows are wrong, the first is 0",
    ),
    (
        *("llama", "digits_are_cut_off", "prove-trainer-export"),
        "echelon in bf16: embedding.weight",
        "elements are not rounded to the nearest number",
    ),
    (
        *("llama", "imported_rows_have_another_order", "prove-trainer-import"),
        "echelon: layers.0.attention.k.weight",
        "its rows are in another order",
    ),
    (
        *("lora", "adapters_merged_without_their_scale", "prove-trainer-export"),
        "echelon: layers.0.attention.q.weight",
        "its adapter is 2 x the right one",
    ),
    (
        *("lora", "rows_behind_a_block_come_from_before_it", "prove-trainer-export"),
        "echelon: layers.0.attention.q.weight",
        "rows are wrong, the first is 11",
    ),
    (
        *("llama", "columns_of_a_rank_are_the_first", "prove-trainer-import"),
        "echelon: embedding.weight",
        "257 of 257 rows are wrong",
    ),
    (
        *("llama", "moments_change_places", "prove-trainer-import"),
        "deepspeed of llama in fp32: exp_avg embedding.weight",
        "rows are wrong",
    ),
    (
        *("llama", "halves_of_a_gate_are_not_told_apart", "prove-trainer-export"),
        "megatron-legacy of tp2 x pp2: layers.0.mlp.gate.weight",
        "rows are wrong, the first is",
    ),
    (
        *("llama", "last_rows_of_a_part_come_too_early", "prove-trainer-export"),
        "megatron-legacy of tp2 x pp2: layers.0.attention.o.weight",
        "rows are wrong, the first is",
    ),
    (
        *("lora", "adapters_in_the_order_of_pairs", "prove-trainer-export"),
        "adapters of hf of llama: model.layers.1.self_attn.q_proj.weight",
        "rows are wrong, the first is 1",
    ),
    (
        *("gpt2", "square_matrix_not_transposed", "prove-trainer-export"),
        "hf of gpt2: transformer.h.0.attn.c_proj.weight",
        "it is transposed",
    ),
)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("model", "bug", "rule", "tensor", "says"), BUGS, ids=[bug[1] for bug in BUGS]
)
def test_a_wrong_export_or_import_is_named(
    trained: TrainedRuns, model: str, bug: str, rule: str, tensor: str, says: str
) -> None:
    claims = trained.export(model, f"{WRONG}:{bug}")
    first = next(claim for claim in claims if not claim.holds)
    assert first.rule.id == rule
    assert first.failures[0].subject == tensor
    assert says in first.failures[0].detail


def test_a_wrong_table_of_names_is_told_by_the_part(
    trained: TrainedRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prover has the same table here, so no tensor is unlike another."""
    beside = "echelon.proof.independent.hugging_face.beside.find_naming"
    monkeypatch.setattr(beside, names_with_pairs)
    exported, _ = trained.export("llama", f"{WRONG}:table_of_names_has_pairs")
    wrong = exported.failures[0]
    assert wrong.subject == "hf of llama: attention of layers.1"
    assert "transformers differs: off by" in wrong.detail


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "GPT2LMHeadModel"])
def test_exports_of_each_family_hold(rank_pool: RankPool, family: str) -> None:
    plan = plan_of(FAMILIES[family])
    assert why_not_read(plan) == ""
    result = whole_run_pass(plan, run_ranks=rank_pool.run, exported_in="bf16")
    assert result.diagnosis is None
    assert "transformers" not in result.claims[-2].note


@pytest.mark.slow
def test_moments_of_norms_have_no_offset(rank_pool: RankPool) -> None:
    """Files of Gemma have norm weights less 1; what an optimizer keeps of them is as it is."""
    small = plan_of({"norm_offset": 1.0, "tied": True, "activation": "gelu"})
    factors = replace(small.model.multipliers, embedding=small.model.hidden**0.5)
    model = replace(small.model, multipliers=factors)
    plan = replace(small, mathematics=replace(small.mathematics, model=model))
    exports = exports_of(plan, "fp64")
    assert "deepspeed of gemma in fp32" in [export.name for export in exports]
    result = whole_run_pass(plan, run_ranks=rank_pool.run, exported_in="fp64")
    assert result.diagnosis is None, result.diagnosis.sentence()


def test_models_without_a_class_are_exported_in_own_names_alone() -> None:
    plan = plan_of({"soft_cap": 5.0, "mlp_bias": True})
    assert exports_of(plan, "fp16") == (Export(to="echelon"), Export(to="echelon", dtype="fp16"))
    assert why_not_read(plan).startswith("no class has these factors")


@pytest.mark.parametrize(
    ("model", "own"), [(NANO, False), (MIXTRAL, False), (GPT2, True), (DEEPSEEK, True)]
)
def test_families_that_lay_weights_out_otherwise_are_known(model: ModelShape, own: bool) -> None:
    assert has_own_layout(model) is own


def test_a_difference_is_said_in_words() -> None:
    right = torch.arange(64.0).reshape(8, 8) ** 1.5
    assert how_it_differs(right[:4], right) == "its shape is [4, 8] instead of [8, 8]"
    assert how_it_differs(2 * right, right) == "2 x the right one"
    assert how_it_differs(right.T, right) == "it is transposed"
    assert how_it_differs(right.flip(0), right) == (
        "its rows are in another order: row 0 is row 7 of the right one"
    )
    doubled = right[[0, 1, 1, 3, 4, 5, 6, 7]]
    assert how_it_differs(doubled, right) == (
        "its rows are not all there: row 2 is row 1 of the right one"
    )
    cut = right.clone()
    cut[5:] = 0.0
    assert how_it_differs(cut, right) == "3 of 8 rows are wrong and zero, the first is 5"
    plain = right - 1.0
    assert how_it_differs(right + 2.0, right, plain) == "its adapter is 3 x the right one"
    assert how_it_differs(right[0] + 1, right[0]) == "8 of 8 rows are wrong, the first is 0"


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    plan = plan_of({})
    with pytest.raises(StopIteration):
        read_tensors(tmp_path)
    weights = own_weights(Export(to="echelon"), plan.model, {"norm.weight": torch.ones(2)})
    assert weights["norm.weight"].dtype is torch.float64
