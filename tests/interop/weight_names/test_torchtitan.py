"""Where torchtitan keeps a parameter: before 0.3 and since, with pairs of neighbours or halves."""

from __future__ import annotations

from dataclasses import replace

from echelon.interop.weight_names.names import find_naming
from echelon.interop.weight_names.torchtitan import EMBEDDING_KEY
from tests.parallel.layouts import NANO

NAME = "layers.0.attention.q.weight"


def test_older_names_are_known_by_the_keys() -> None:
    newer = find_naming(NANO, {EMBEDDING_KEY, "layers.0.attention.qkv_linear.wq.weight"})
    older = find_naming(NANO, {EMBEDDING_KEY, "output.weight"})
    assert newer is not None
    assert older is not None
    assert newer.sources[NAME].key == "layers.0.attention.qkv_linear.wq.weight"
    assert older.sources[NAME].key == "layers.0.attention.wq.weight"
    assert newer.sources["head.weight"].key == "lm_head.weight"
    assert older.sources["head.weight"].key == "output.weight"


def test_llama_turns_neighbours_and_qwen_halves() -> None:
    llama = find_naming(NANO, {EMBEDDING_KEY})
    qwen = find_naming(replace(NANO, qk_norm=True), {EMBEDDING_KEY})
    assert llama is not None
    assert qwen is not None
    assert [run.there for run in llama.sources[NAME].runs(0, NANO.head_dim)] == [0, 1]
    assert [run.step for run in qwen.sources[NAME].runs(0, NANO.head_dim)] == [1]
