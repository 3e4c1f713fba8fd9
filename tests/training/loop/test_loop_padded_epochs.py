"""A run whose epochs are padded reads duplicates, and goes on from any step under any layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.launch.local.supervisor import RankPool
from echelon.launch.root_cause import RankFailure
from echelon.training.data.dataset import TokenDataset
from echelon.training.data.prepare import prepare
from tests.training.small_runs import FP64, checkpoint_of, read_steps, train

SETTINGS = (
    *FP64,
    "data.validation_fraction=0",
    "batch.global_sequences=16",
    "batch.microbatch_sequences=2",
)
PADDED = (*SETTINGS, "data.epoch_end=pad")


@pytest.mark.slow
@pytest.mark.system("S08")
def test_a_padded_run_goes_on_under_another_layout(rank_pool: RankPool, tmp_path: Path) -> None:
    """S08: 8 steps are more than two epochs; resumed inside of one on 4 ranks in place of 2."""
    (tmp_path / "words.txt").write_text("".join(f"line {i} of {i * i % 97}\n" for i in range(45)))
    data = tmp_path / "data"
    prepare([str(tmp_path / "words.txt")], data, tokenizer="bytes")
    num_samples = TokenDataset.open(data).num_samples(16)
    assert num_samples % 16
    assert 2 * 16 < num_samples < 3 * 16

    train(rank_pool, tmp_path / "whole", data, (*PADDED, "mesh.dp_replicate=2"))
    whole = read_steps(tmp_path / "whole")
    middle = checkpoint_of(tmp_path / "whole", 4)
    train(rank_pool, tmp_path / "rest", data, (*PADDED, "mesh.dp_replicate=4"), resume=middle)
    rest = read_steps(tmp_path / "rest")
    assert sorted(rest) == [5, 6, 7, 8]
    for step, values in rest.items():
        assert values == pytest.approx(whole[step], rel=1e-12, abs=0)

    train(rank_pool, tmp_path / "plain", data, (*SETTINGS, "mesh.dp_replicate=2"))
    plain = read_steps(tmp_path / "plain")
    assert [plain[step] for step in (1, 2)] == [whole[step] for step in (1, 2)]
    assert plain[3] != whole[3], "the third step is filled with other samples"
    with pytest.raises(RankFailure) as failure:
        train(
            rank_pool, tmp_path / "mixed", data, (*SETTINGS, "mesh.dp_replicate=4"), resume=middle
        )
    assert failure.value.error is not None
    assert failure.value.error.rules == ("resume-same-data",)
    assert "data.epoch_end = pad" in str(failure.value.error)
