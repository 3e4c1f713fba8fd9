"""The tokenizer, its template and what generates text stand beside weights that leave."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from echelon.training.data.beside_weights import files_beside, tokenizer_files
from echelon.training.data.prepare import PrepareOptions, prepare
from echelon.training.data.tokenizer import (
    ByteTokenizer,
    Tokenizer,
    load_tokenizer,
    train_tokenizer,
)
from tests.training.data.chats.made_tokenizers import (
    CHATS,
    MARKED,
    PLAIN,
    tokenizer_folder,
    write_records,
)

HELLO = [{"role": "user", "content": "Be brief"}, {"role": "assistant", "content": "blue"}]

TEXTS = (
    "plain words\n",
    "h\u00e9llo \u4e16\u754c \U0001f600",
    "\ttab and  two spaces ",
    "",
    "\x00\x7f",
)


def run_file(folder: Path, *lines: str) -> Path:
    """Write the run file of a run on chats."""
    text = f'[model]\nvocab = 384\n[train]\nruns_dir = "{folder}/runs"\n'
    file = folder / "run.toml"
    file.write_text('extends = "nano"\n' + text + "\n".join(lines) + "\n")
    return file


@pytest.fixture
def chats(tmp_path: Path) -> tuple[Path, Path, str]:
    """Return a tokenizer, chats that were prepared with it, and its hash."""
    folder = tokenizer_folder(tmp_path / "tokenizer", MARKED)
    records = write_records(tmp_path / "chats.jsonl", CHATS)
    options = PrepareOptions(format="chat")
    prepare([records], tmp_path / "data", tokenizer=str(folder), options=options)
    return folder, tmp_path / "data", load_tokenizer(str(folder)).description.hash


def test_a_folder_that_is_known_is_copied_as_it_is(
    chats: tuple[Path, Path, str], tmp_path: Path
) -> None:
    """And the template is that of the data, whatever stands beside the tokenizer by now."""
    tokenizer, data, wanted = chats
    (tokenizer / "special_tokens_map.json").write_text('{"pad_token": "<|end_of_document|>"}')
    (tokenizer / "chat_template.jinja").write_text(PLAIN)
    (tokenizer / "notes.txt").write_text("nobody's")
    (tokenizer / "generation_config.json").write_text('{"eos_token_id": [1, 7], "top_k": 5}')
    found = files_beside(run_file(tmp_path, f'[data]\ntokenizer = "{tokenizer}"'), data, wanted, 64)
    assert found.said.endswith(f"300 ids, as in {tokenizer}")
    assert found.config == {"eos_token_id": [1, 7]}
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        assert found.files[name] == (tokenizer / name).read_bytes()
    assert found.files["chat_template.jinja"].decode() == MARKED
    assert json.loads(found.files["generation_config.json"])["top_k"] == 5
    assert "notes.txt" not in found.files
    (tmp_path / "out").mkdir()
    found.write(tmp_path / "out")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = loaded.apply_chat_template(HELLO, tokenize=False)
    assert text.startswith("<|user|>\nBe brief\n<|assistant|>\nblue")


def test_data_alone_gives_tokenizer_and_template(
    chats: tuple[Path, Path, str], tmp_path: Path
) -> None:
    _, data, wanted = chats
    found = files_beside(run_file(tmp_path), data, wanted, 64)
    assert found.files["chat_template.jinja"].decode() == MARKED
    assert json.loads(found.files["tokenizer_config.json"])["model_max_length"] == 64
    assert set(found.config) == {"eos_token_id"}


def test_weights_that_a_run_began_with_say_how_text_is_generated(
    chats: tuple[Path, Path, str], tmp_path: Path
) -> None:
    """Their tokenizer is not taken where it is another one."""
    _, data, wanted = chats
    base = tmp_path / "base"
    base.mkdir()
    (base / "generation_config.json").write_text('{"eos_token_id": 3, "temperature": 0.6}')
    (base / "tokenizer_config.json").write_text("{}")
    found = files_beside(run_file(tmp_path, f'weights = "{base}"'), data, wanted, 64)
    assert json.loads(found.files["generation_config.json"])["temperature"] == 0.6
    assert found.config == {"eos_token_id": 3}
    assert found.files["tokenizer_config.json"] != b"{}"


def test_what_is_gone_or_was_made_anew_is_said(
    chats: tuple[Path, Path, str], tmp_path: Path
) -> None:
    _, data, wanted = chats
    file = run_file(tmp_path)
    gone = files_beside(file, tmp_path / "gone", wanted, 64)
    assert (gone.files, gone.said.startswith("none, for the run's data is not there")) == ({}, True)
    other = files_beside(file, data, ByteTokenizer().description.hash, 64)
    assert (other.files, other.said.startswith("none: the data of the run was made anew")) == (
        {},
        True,
    )


@pytest.fixture(scope="module", params=["bytes", "bpe-300"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "bytes":
        return ByteTokenizer()
    return train_tokenizer("bpe-300", iter(["some words that come again and again " * 20]))


def test_the_same_ids_and_the_same_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for name, text in tokenizer_files(tokenizer, 128).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    # transformers asks the folder which model it is for.
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert theirs(text, add_special_tokens=False).input_ids == ids
        assert theirs.decode(ids) == text
    assert theirs.eos_token_id == tokenizer.description.end_of_document
    assert len(theirs) == tokenizer.description.vocabulary
    assert theirs.model_max_length == 128
