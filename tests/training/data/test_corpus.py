"""The data of a run is prepared once, below the folder of runs, however many ask for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from echelon.core.errors import DataError
from echelon.training.data.corpus import prepared_data
from echelon.training.data.dataset import TokenDataset
from echelon.training.data.prepare import PrepareOptions, prepare, stdlib_files

SMALL = PrepareOptions(max_bytes=200_000)


def test_the_standard_library_is_a_corpus() -> None:
    names = [file.name for file in stdlib_files()]
    assert "argparse.py" in names
    assert "asyncio/tasks.py" in names
    assert len(names) > 300
    assert not [name for name in names if {"test", "tests", "site-packages"} & set(name.split("/"))]
    assert names == [file.name for file in stdlib_files()]
    assert names != sorted(names)


def test_the_corpus_is_utf8_text_of_some_size(tmp_path: Path) -> None:
    dataset = TokenDataset.open(prepared_data("stdlib", "bytes", tmp_path), verify=True)
    assert dataset.num_tokens > 4_000_000
    assert dataset.index.max_token == 256
    training, validation = dataset.split(0.01)
    assert 0.005 < validation.num_tokens / dataset.num_tokens < 0.02
    assert "import" in dataset.tokenizer().decode(training.tokens(0, 50_000).tolist())


def test_a_python_without_its_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError) as raised:
        stdlib_files(tmp_path)
    assert raised.value.rules == ("data-empty",)
    assert raised.value.problems[0].key == "data.source"


def test_preparing_again_finds_what_is_there(tmp_path: Path) -> None:
    first = prepared_data("stdlib", "bytes", tmp_path, options=SMALL)
    stamp = (first / "index.json").stat().st_mtime_ns
    assert prepared_data("stdlib", "bytes", tmp_path, options=SMALL) == first
    assert (first / "index.json").stat().st_mtime_ns == stamp
    assert first.parent == tmp_path / "data"
    other = prepared_data("stdlib", "bpe-300", tmp_path, options=SMALL)
    assert other != first
    assert TokenDataset.open(other).index.tokenizer.name == "bpe-300"


def test_other_content_is_other_data(tmp_path: Path, text_file: Path) -> None:
    first = prepared_data(str(text_file), "bytes", tmp_path / "runs")
    text_file.write_text("changed")
    second = prepared_data(str(text_file), "bytes", tmp_path / "runs")
    assert first != second
    assert TokenDataset.open(second).num_tokens == 8
    copy = tmp_path / "elsewhere" / text_file.name
    copy.parent.mkdir()
    copy.write_text("changed")
    assert prepared_data(str(copy), "bytes", tmp_path / "runs") == second


def test_prepared_data_is_taken_as_it_is(tmp_path: Path, text_file: Path) -> None:
    tokens = tmp_path / "tokens"
    prepare([text_file], tokens, tokenizer="bpe-280")
    for tokenizer in ("bpe-280", str(tokens), str(tokens / "tokenizer.json")):
        assert prepared_data(str(tokens), tokenizer, tmp_path / "runs") == tokens
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe-300"])
def test_prepared_data_of_another_tokenizer_is_refused(
    tmp_path: Path, text_file: Path, tokenizer: str
) -> None:
    prepare([text_file], tmp_path / "tokens", tokenizer="bpe-280")
    with pytest.raises(DataError) as raised:
        prepared_data(str(tmp_path / "tokens"), tokenizer, tmp_path / "runs")
    assert raised.value.rules == ("data-tokenizer-same",)
    assert raised.value.problems[0].suggestions == ('data.tokenizer = "bpe-280"',)


def test_a_missing_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError) as raised:
        prepared_data(str(tmp_path / "gone.txt"), "bytes", tmp_path / "runs")
    assert raised.value.rules == ("data-source-unreadable",)


_PREPARE = """
import sys
from echelon.training.data.corpus import prepared_data
from echelon.training.data.prepare import PrepareOptions
options = PrepareOptions(max_bytes=200_000)
sys.stdin.readline()
print(prepared_data("stdlib", "bytes", sys.argv[1], options=options))
"""


def test_processes_that_prepare_at_once_agree(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", _PREPARE, str(tmp_path)]
    processes = [
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [process.communicate(timeout=60) for process in processes]
    assert {error for _, error in answers} == {""}
    paths = {output.strip() for output, _ in answers}
    assert len(paths) == 1
    TokenDataset.open(paths.pop(), verify=True)
    assert len(list((tmp_path / "data").iterdir())) == 1


def test_the_loser_of_a_race_takes_what_the_winner_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process commits after we have looked and before we begin."""
    winner = prepared_data("stdlib", "bytes", tmp_path, options=SMALL)
    exists = Path.exists
    looks: list[Path] = []

    def late(self: Path, **options: bool) -> bool:
        if self == winner and not looks:
            looks.append(self)
            return False
        return exists(self, **options)

    monkeypatch.setattr(Path, "exists", late)
    assert prepared_data("stdlib", "bytes", tmp_path, options=SMALL) == winner
    assert looks == [winner]
