"""The loop delivers the rows of steps and of validation, with their counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from echelon.config.job import DataSettings
from echelon.core.errors import DataError
from echelon.core.serialize import to_json
from echelon.launch.local.supervisor import RankPool
from echelon.launch.root_cause import RankFailure
from echelon.proof.shrink import shrink
from tests.proof.layouts import layout

TARGET = "echelon.training.delivered:deliver"


def delivered(pool: RankPool, folder: Path, data: DataSettings, **changes: Any) -> dict[str, Any]:
    plan = shrink(layout(dp=2), precision="fp64")
    argument = {"folder": str(folder), "plan": plan.to_json(), "data": to_json(data)}
    argument |= {"stretch": 100, "most_tokens": 300}
    pool.run(TARGET, {**argument, "length": 16, "max_bytes": 5000, **changes}, 1, labels=[""])
    return json.loads((folder / "delivered.json").read_text())


def test_rows_are_those_of_steps_around_the_end_of_an_epoch(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    text = "0123456789" * 50
    (tmp_path / "text.txt").write_text(text)
    result = delivered(rank_pool, tmp_path, DataSettings(source=str(tmp_path / "text.txt")))
    assert (result["length"], result["tokenizer"], result["end"]) == (4, "", 256)
    (training,), (validation,) = result["parts"]
    assert (training["num_tokens"], validation["num_tokens"]) == (496, 5)
    # The first 300 tokens, 100 at a time; lengths of documents only where all are read.
    assert (len(training["sums"]), training["documents"]) == (3, None)
    assert (len(validation["sums"]), validation["documents"]) == (1, [5])
    # 124 samples, 6 of them in a step.
    assert list(result["training"]) == ["0", "1", "19", "20", "21"]
    for batch in result["training"].values():
        assert len(batch["rows"]) == 6
        assert batch["num_tokens"] == sum(
            label != -100 for row in batch["rows"] for label in row["labels"]
        )
        for row in batch["rows"]:
            first = 4 * row["sample"]
            assert bytes(row["tokens"]).decode() == text[first : first + 4]
            assert row["documents"] is None
    (held_out,) = result["validation"].values()
    assert [row["sample"] for row in held_out["rows"]] == list(range(6))
    assert held_out["rows"][0]["labels"] == [*b"789", 256]


def test_a_limit_leaves_less_to_read(rank_pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("0123456789" * 500)
    data = DataSettings(source=str(tmp_path / "text.txt"), validation_fraction=0.5)
    parts = delivered(rank_pool, tmp_path, data, max_bytes=999)["parts"]
    assert [[source["num_tokens"] for source in part] for part in parts] == [[500], [500]]


def test_records_that_are_none_are_the_error_of_the_trainer(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    (tmp_path / "text.jsonl").write_text("no record")
    data = DataSettings(source=str(tmp_path / "text.jsonl"))
    with pytest.raises(RankFailure, match="data-record") as caught:
        delivered(rank_pool, tmp_path, data)
    assert isinstance(caught.value.error, DataError)
