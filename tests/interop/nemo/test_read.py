"""A YAML of NeMo is the command of Megatron-LM that it stands for."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.interop.import_context import ImportContext, import_context
from echelon.interop.key_reader import COUNT, KeyReader
from echelon.interop.nemo.read import Translation, fill_references, read_translated
from tests.interop.imports import Imports, rows_of, set_by

SMALL = """
trainer: {num_nodes: 1, devices: 4, precision: bf16, max_steps: 20, gradient_clip_val: 0.5}
model:
  micro_batch_size: 1
  global_batch_size: 8
  tensor_model_parallel_size: 2
  encoder_seq_length: 32
  max_position_embeddings: 64
  num_layers: 4
  hidden_size: 64
  ffn_hidden_size: ${multiply:4, ${.hidden_size}}
  num_attention_heads: 4
  num_query_groups: 2
  override_vocab_size: 300
  hidden_dropout: 0.0
  attention_dropout: 0.0
  normalization: rmsnorm
  activation: fast-swiglu
  bias: false
  position_embedding_type: rope
  share_embeddings_and_output_weights: false
  optim:
    {name: distributed_fused_adam, lr: 1e-3, betas: [0.9, 0.98], sched: {name: CosineAnnealing}}
"""


@pytest.fixture
def nemo(tmp_path: Path) -> Imports:
    return Imports(tmp_path, "nemo")


def test_the_run_is_the_one_that_megatron_would_train(nemo: Imports) -> None:
    found = nemo(SMALL)
    plan = found.job.plan
    assert (plan.mesh.tp, plan.mesh.world_size, plan.layout.zero.stage) == (2, 4, 1)
    model, optimizer = plan.model, plan.mathematics.optimizer
    assert (model.kv_heads, model.ffn, model.gated, model.norm) == (2, 256, True, "rmsnorm")
    assert (model.tied, model.mlp_bias, model.vocab) == (False, False, 512)
    assert (optimizer.beta2, optimizer.clip_norm, optimizer.learning_rate) == (0.98, 0.5, 1e-3)
    assert set_by(found, "model.num_layers") == {"model.layers": 4}
    assert rows_of(found, "model.ffn_hidden_size")[0].given == "256"


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("fast-swiglu", "reglu", "model.activation"),
        ("attention_dropout: 0.0", "attention_dropout: 0.1", "model.attention_dropout"),
        ("rmsnorm", "layernorm1p", "model.normalization"),
        ("distributed_fused_adam", "lion", "model.optim.name"),
        ("bias: false", "bias: false\n  num_layerz: 3", "model.num_layerz"),
    ],
)
def test_what_is_refused_has_the_name_that_nemo_has(
    nemo: Imports, old: str, new: str, place: str
) -> None:
    assert place in [where for _, where in nemo.refused(SMALL.replace(old, new))]


def test_references_are_filled_and_sums_made() -> None:
    given: dict[str, object] = {
        "model.hidden_size": 64,
        "model.ffn": "${multiply:4, ${.hidden_size}}",
        "model.seq": "${training.model.length}",
        "model.length": 128,
        "run.name": "gpt_${model.hidden_size}",
        "run.dir": "${base_dir}/x",
        "run.bad": "${multiply:a, 2}",
        "run.loop": "${run.loop}",
    }
    found = fill_references(given)
    assert (found["model.ffn"], found["model.seq"], found["run.name"]) == (256, 128, "gpt_64")
    assert (found["run.dir"], found["run.bad"]) == ("${base_dir}/x", "${multiply:a, 2}")
    assert found["run.loop"] == "${run.loop}"


def read_flags(reader: KeyReader, _: ImportContext) -> None:
    reader.take("--layers", "model.layers", COUNT, "as --layers has it")
    reader.set_or_default("--heads", "model.heads", 8, "default")
    if reader.has("--bad"):
        reader.refuse("--bad", "it is not --layers")
    reader.assume("--heads of the other tool")
    reader.finish()


def test_rows_refusals_and_sources_have_the_first_names() -> None:
    reader = KeyReader(tool="Tool", path="file", given={"m.layers": 2, "m.bad": True})
    translation = Translation(
        flags={"--layers": 2, "--bad": True},
        origins={"--layers": "m.layers", "--bad": "m.bad"},
        names={"--heads": "m.heads"},
    )
    read_translated(reader, translation, read_flags, import_context({}, None))
    assert reader.entries["model.layers"].source == "file: m.layers"
    assert {row.key: row.why for row in reader.rows} == {
        "m.layers": "as m.layers has it",
        "m.heads": "default",
    }
    (refusal,) = reader.refusals
    assert refusal.keys == ("m.bad",)
    assert refusal.problem.message == "m.bad = true: it is not m.layers"
    assert reader.assumptions == ["m.heads of the other tool"]
    assert set(translation.origins.values()) <= set(reader.known)
