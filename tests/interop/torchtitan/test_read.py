"""A torchtitan configuration: its mesh is ours, its FSDP 2 is stage 3, its defaults are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.core.plan import Context, ContextKind
from echelon.interop.importer import detect_tool
from echelon.interop.torchtitan.abilities import FLAVORS, TABLES, Flavor
from tests.interop.imports import Imports, rows_of, set_by
from tests.interop.torchtitan.configs import SMALL, small

LLAMA = (Path(__file__).parents[1] / "files" / "llama3_70b.toml").read_text(encoding="utf-8")


@pytest.fixture
def titan(tmp_path: Path) -> Imports:
    return Imports(tmp_path, "torchtitan")


def test_one_of_its_own_files(titan: Imports) -> None:
    found = titan(LLAMA, sets=["cluster.preset=64xh100"])
    plan = found.job.plan
    assert (plan.mesh.tp, plan.mesh.dp_shard, plan.mesh.world_size) == (8, 8, 64)
    assert (plan.model.layers, plan.model.hidden) == (80, 8192)
    assert (plan.layout.zero.stage, plan.layout.sequence_parallel) == (3, True)
    assert (plan.mathematics.global_sequences, plan.layout.microbatch_sequences) == (64, 8)
    assert plan.layout.recompute.policy == "full"
    precision, optimizer = plan.mathematics.precision, plan.mathematics.optimizer
    assert (precision.parameters, precision.reduction, precision.master) == ("bf16", "fp32", "fp32")
    assert (optimizer.schedule, optimizer.final_ratio, optimizer.decay) == ("linear", 0.0, "all")
    assert (optimizer.warmup_steps, optimizer.total_steps) == (200, 1000)


def test_its_files_are_told_by_their_tables() -> None:
    assert detect_tool(Path("file"), LLAMA) == "torchtitan"


def test_leftover_ranks_need_a_number(titan: Imports) -> None:
    found = titan(LLAMA)
    assert found.job.plan.mesh.world_size == 8
    assert "8 ranks, the fewest that hold the model" in found.assumptions[0]
    assert titan(LLAMA, ranks=16, sets=["cluster.preset=16xh100"]).job.plan.mesh.dp_shard == 2


def test_what_is_not_said_is_what_torchtitan_has(titan: Imports) -> None:
    text = "[training]\n[parallelism]\ndata_parallel_shard_degree = 1"
    plan = titan(text, extends="llama3-8b").job.plan
    optimizer = plan.mathematics.optimizer
    assert (optimizer.learning_rate, optimizer.warmup_steps) == (8e-4, 200)
    assert (optimizer.total_steps, optimizer.weight_decay) == (10_000, 0.1)
    assert (plan.mathematics.sequence_length, plan.mathematics.global_sequences) == (2048, 8)
    assert (plan.layout.zero.stage, plan.mathematics.precision.parameters) == (0, "bf16")


@pytest.mark.parametrize(
    ("degrees", "mesh", "stage"),
    [
        ({"shard": 2, "replicate": 2}, (2, 2), 3),
        ({"shard": 1, "replicate": 4}, (4, 1), 0),
        ({"shard": 1, "replicate": 1}, (1, 1), 0),
    ],
)
def test_data_ranks_share_out_or_are_copies(
    titan: Imports, degrees: dict[str, int], mesh: tuple[int, int], stage: int
) -> None:
    lines = "\n".join(f"data_parallel_{k}_degree = {v}" for k, v in degrees.items())
    text = f"[training]\nseq_len = 64\nlocal_batch_size = 1\n[parallelism]\n{lines}"
    plan = titan(text, extends="nano").job.plan
    assert (plan.mesh.dp_replicate, plan.mesh.dp_shard) == mesh
    assert plan.layout.zero.stage == stage


def test_ranks_that_do_not_fit_are_a_conflict(titan: Imports) -> None:
    (problem,) = titan.problems(small(), ranks=6, extends="nano")
    assert problem.rule == "import-conflict"
    assert problem.suggestions[0] == "--ranks 2"


@pytest.mark.parametrize(("method", "kind"), [("allgather", "gathered"), ("alltoall", "ring")])
def test_context_ranks(titan: Imports, method: str, kind: ContextKind) -> None:
    more = f'context_parallel_degree = 2\ncontext_parallel_rotate_method = "{method}"'
    layout = titan(small(parallel=more), extends="nano").job.plan.layout
    assert (layout.context, layout.zero.stage) == (Context(kind=kind), 3)


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ('mode = "none"', ("none", 1)),
        ('mode = "full"', ("full", 1)),
        ('mode = "selective"\nselective_ac_option = "2"', ("full", 2)),
        ('mode = "selective"\nselective_ac_option = "op"', ("selective", 1)),
        ('mode = "memory_budget"\nmemory_budget = 0.5', ("none", 1)),
    ],
)
def test_which_blocks_are_redone(titan: Imports, table: str, expected: tuple[str, int]) -> None:
    found = titan(f"{SMALL}\n[activation_checkpoint]\n{table}", extends="nano")
    recompute = found.job.plan.layout.recompute
    assert (recompute.policy, recompute.every) == expected


@pytest.mark.parametrize(
    ("text", "rule", "where"),
    [
        (small("seq_length = 64"), "import-unknown-key", "training.seq_length"),
        (small("batch_sise = 64"), "import-unknown-key", "training.batch_sise"),
        ('[model]\nconverters = ["float8"]\n' + SMALL, "import-not-honoured", "model.converters"),
        (small() + "[lr_scheduler]\ntotal_steps = 7", "import-not-honoured", "total_steps"),
        ('[optimizer]\nname = "Adam"\n' + SMALL, "import-not-honoured", "optimizer.name"),
        ("[fault_tolerance]\nenable = true\n" + SMALL, "import-not-honoured", "enable"),
        ("training = 3\n[parallelism]", "wrong-type", "training"),
        ("[training\n", "import-syntax", "foreign"),
    ],
)
def test_what_is_refused_is_named(titan: Imports, text: str, rule: str, where: str) -> None:
    found = titan.refused(text, extends="nano")
    assert any(one == rule and place.endswith(where) for one, place in found), found


def test_an_unknown_key_names_the_nearest(titan: Imports) -> None:
    (problem,) = titan.problems(small("seq_lenn = 64"), extends="nano")
    assert problem.suggestions == ("training.seq_len",)


def test_checkpoints_and_validation(titan: Imports) -> None:
    text = SMALL + "[checkpoint]\nenable = true\ninterval = 7\nkeep_latest_k = 0\n"
    text += "[validation]\nenabled = true\nfreq = 5\nsteps = 3\n[metrics]\nlog_freq = 4"
    job = titan(text, extends="nano").job
    assert (job.checkpoint.every, job.checkpoint.keep) == (7, "all")
    assert (job.train.validate_every, job.train.validation_batches) == (5, 3)
    assert job.observe.log_every == 4


def test_experts_are_folded_over_the_data_ranks(titan: Imports) -> None:
    text = small(parallel="expert_parallel_degree = 2\nexpert_tensor_parallel_degree = 1")
    sets = [f"model.experts.{key}" for key in ("num_experts=4", "top_k=2", "ffn=64")]
    plan = titan(text, sets=[*sets, "model.tied=false"], extends="nano").job.plan
    assert (plan.mesh.ep, plan.layout.experts.expert_tp) == (2, 1)


@pytest.mark.parametrize(("words", "flavor"), FLAVORS.items())
def test_every_flavor_is_a_preset_or_what_it_has_otherwise(
    titan: Imports, words: tuple[str, str], flavor: Flavor
) -> None:
    text = f'[model]\nname = "{words[0]}"\nflavor = "{words[1]}"\n{small()}'
    found = titan(text, sets=["cluster.preset=8xh100"])
    told = set_by(found, "model.flavor")
    assert told["model.preset"] == flavor.preset
    assert flavor.changes.items() <= told.items()
    assert found.job.plan.model.name == (flavor.name or flavor.preset)


def test_a_flavor_of_llama_3_is_that_of_3_1(titan: Imports) -> None:
    model = titan(LLAMA, sets=["cluster.preset=64xh100"]).job.plan.model
    assert model.rope_scaling is not None
    assert (model.rope_scaling.factor, model.max_positions) == (8.0, 131072)


def test_positions_that_are_stretched_are_refused(titan: Imports) -> None:
    text = '[model]\nname = "deepseek_v3"\nflavor = "671B"\n' + SMALL.replace("= 64", "= 8192")
    first, *_ = titan.problems(text, sets=["cluster.preset=8xh100"])
    assert (first.rule, first.suggestions[0]) == ("import-not-honoured", "training.seq_len = 4096")


def test_a_flavor_that_is_no_preset_is_refused_or_named_by_the_user(titan: Imports) -> None:
    text = '[model]\nname = "llama3"\nflavor = "debugmodel"\n' + SMALL
    first, *_ = titan.problems(text)
    assert first.rule == "import-not-honoured"
    assert 'name = "llama3", flavor = "8B"' in first.suggestions
    assert titan(text, extends="nano").job.plan.model.name == "nano"


def test_keys_without_need_say_why(titan: Imports) -> None:
    lines = {"training.gc_freq": "50", "optimizer.implementation": '"fused"'}
    text = SMALL.replace("[parallelism]", "gc_freq = 50\n[parallelism]")
    found = titan(text + '[optimizer]\nimplementation = "fused"', extends="nano")
    for key in lines:
        (row,) = rows_of(found, key)
        assert row.why == TABLES.keys["rest"][key].why
