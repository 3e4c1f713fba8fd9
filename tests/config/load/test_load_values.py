"""One value at a time: files that cannot be read, names that are not known, odd values."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.config.load import load_job
from echelon.config.schema import SETTINGS
from echelon.core.rulebook import all_rules
from echelon.core.settings.value_types import toml_text
from tests.config.problems import SMALL, problems_of, write
from tests.walks import examples


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[mesh]\ntp = two\n", "2"),
        ("[mesh]\ntp = 2\ntp = 4\n", "3"),
        ("[mesh\n", "1"),
        ('a = """x\n', "at its end"),
    ],
)
def test_what_is_not_toml_is_told_by_line(tmp_path: Path, text: str, line: str) -> None:
    run = tmp_path / "run.toml"
    run.write_text(text)
    found = problems_of(run)
    assert list(found) == ["toml-syntax"]
    assert found["toml-syntax"].set_by in (f"{run}:{line}", f"{run}, {line}")


def test_bytes_that_are_not_text_are_not_toml(tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_bytes(b"a = '\xff'\n")
    assert list(problems_of(run)) == ["toml-syntax"]


def test_a_missing_file_lists_what_is_there(tmp_path: Path) -> None:
    there = write(tmp_path, SMALL, "nano.toml")
    found = problems_of(tmp_path / "nan.toml")
    assert list(found) == ["no-such-file"]
    assert found["no-such-file"].suggestions == (str(there),)
    (tmp_path / "examples").mkdir()
    other = write(tmp_path / "examples", SMALL, "big.toml")
    found = problems_of(tmp_path / "exmples" / "big.toml")
    assert found["no-such-file"].suggestions == (str(other),)
    assert "there is no folder" in found["no-such-file"].message
    (tmp_path / "boxes.toml").write_text("nodes = 1")
    found = problems_of("nano", [f"cluster.file={tmp_path / 'boxes'}"])
    assert found["no-such-file"].suggestions == (str(tmp_path / "boxes.toml"),)
    found = problems_of(write(tmp_path, 'extends = "gone.toml"'))
    assert found["no-such-file"].set_by == f"{tmp_path / 'run.toml'}:1"


@pytest.mark.parametrize(
    ("sets", "hint"),
    [
        (["model.preset=lama3-8b"], "llama3-8b"),
        (["cluster.preset=8xh10"], "8xh100"),
        (["cluster.preset=h100"], "8xh100"),
        (["cluster.preset=0xh100"], "8xh100"),
        (["cluster.preset=labtop"], "laptop"),
    ],
)
def test_an_unknown_preset_is_told_what_was_meant(sets: list[str], hint: str) -> None:
    found = problems_of("nano", sets)
    assert list(found) == ["unknown-preset"]
    assert hint in found["unknown-preset"].suggestions


ODD_VALUES = st.one_of(
    st.integers(),
    st.just(10**400),
    st.floats(),
    st.booleans(),
    st.text(max_size=8),
    st.lists(st.lists(st.integers(-2, 8), max_size=3), max_size=3),
    st.dictionaries(st.sampled_from(["tp", "x"]), st.integers(), max_size=2),
)


@pytest.mark.slow
@settings(max_examples=examples(250), deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(SETTINGS)), ODD_VALUES, min_size=1, max_size=4))
def test_no_value_is_answered_by_anything_but_a_rule(values: dict[str, object]) -> None:
    sets = [f"{key}={toml_text(value)}" for key, value in values.items()]
    assert set(problems_of("nano", sets)) <= {rule.id for rule in all_rules()}


@pytest.mark.parametrize("text", ["a = " + "[" * 10_000, "a = " + "9" * 10_000, "a = \x00"])
def test_hostile_files_are_not_toml(tmp_path: Path, text: str) -> None:
    run = tmp_path / "run.toml"
    run.write_text(text)
    assert list(problems_of(run)) == ["toml-syntax"]
    (tmp_path / "config.json").write_text(text.removeprefix("a = "))
    found = problems_of("nano", [f"model.hf_config={tmp_path}"])
    assert list(found) == ["hf-config-unreadable"]


@pytest.mark.parametrize("text", ["25 MiB", "25MiB", "26214400", "26_214_400"])
def test_a_size_is_written_with_its_unit_or_without(text: str) -> None:
    job = load_job("nano", [f"zero.bucket_bytes={text}"])
    assert job.plan.layout.zero.bucket_bytes == 25 * 2**20


@pytest.mark.parametrize("text", ["25 megs", "25 mib", "25 MB/s", "-1 MB"])
def test_a_size_that_cannot_be_read_is_one_error(text: str) -> None:
    found = problems_of("nano", [f"zero.bucket_bytes={text}"])
    assert list(found) == ["unreadable-quantity"]
    works = ('"25 MiB"',) if text == "25 mib" else ('"24 GB"', '"80 GiB"')
    assert found["unreadable-quantity"].suggestions == works
    assert list(problems_of("nano", ["zero.bucket_bytes=0 B"])) == ["out-of-range"]
