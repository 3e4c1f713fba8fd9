"""One value at a time: files that cannot be read, names that are not known, values that misfit."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.config.kinds import toml_text
from echelon.config.schema import SETTINGS
from echelon.core.rulebook import all_rules
from tests.config.problems import SMALL, problems_of, write


@pytest.mark.parametrize(
    ("value", "rule", "works"),
    [
        ('"2"', "wrong-type", ("2",)),
        ("1.5", "wrong-type", ("1", "2")),
        ("true", "wrong-type", ()),
        ("[2]", "wrong-type", ()),
        ("0", "degree-at-least-one", ("1",)),
        ("-2", "degree-at-least-one", ("1",)),
        ("1_000_000_000_000", "out-of-range", ("1048576",)),
    ],
)
@pytest.mark.parametrize("axis", ["pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"])
def test_a_degree_is_a_whole_number_from_one(
    tmp_path: Path, axis: str, value: str, rule: str, works: tuple[str, ...]
) -> None:
    run = write(tmp_path, f"{SMALL}\n[mesh]\n{axis} = {value}")
    found = problems_of(run)
    assert list(found) == [rule]
    assert found[rule].key == f"mesh.{axis}"
    assert found[rule].set_by == f"{run}:16"
    assert found[rule].works == works


@pytest.mark.parametrize(
    ("setting", "rule"),
    [
        ("optimizer.learning_rate=0", "out-of-range"),
        ("optimizer.learning_rate=-1e-3", "out-of-range"),
        ("optimizer.learning_rate=inf", "out-of-range"),
        ("optimizer.learning_rate=nan", "out-of-range"),
        ("optimizer.learning_rate=fast", "wrong-type"),
        ("optimizer.beta1=1.0", "out-of-range"),
        ("optimizer.clip_norm=0", "out-of-range"),
        ("optimizer.kind=adam", "unknown-choice"),
        ("model.dropout=1", "out-of-range"),
        ("model.layers=0", "out-of-range"),
        ("model.tied=1", "wrong-type"),
        ("zero.stage=4", "out-of-range"),
        ("recompute.policy=ful", "unknown-choice"),
        ("pipeline.stages=evn", "wrong-type"),
        ("pipeline.stages=[0, 1]", "wrong-type"),
        ("train.run_name=a/b", "out-of-range"),
        ("train.validate_every=0", "out-of-range"),
        ("checkpoint.every=nevr", "wrong-type"),
        ("data.source=''", "out-of-range"),
    ],
)
def test_a_value_must_fit_its_setting(setting: str, rule: str) -> None:
    found = problems_of("nano", [setting])
    assert rule in found
    assert found[rule].key == setting.partition("=")[0]
    assert found[rule].set_by == f"--set {setting}"
    assert "conflicting-settings" not in found


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("mesh.tpp", "mesh.tp"),
        ("msh.tp", "mesh.tp"),
        ("tp", "mesh.tp"),
        ("batch.sequence_lenght", "batch.sequence_length"),
        ("optimizer.lr_schedule", "optimizer.schedule"),
        ("parallel.sequence_parallel", "mesh.sequence_parallel"),
        ("model.rope_scaling.factr", "model.rope_scaling.factor"),
        ("train.seeed", "train.seed"),
    ],
)
def test_a_misspelt_key_is_told_what_was_meant(key: str, meant: str) -> None:
    found = problems_of("nano", [f"{key}=2"])
    assert list(found) == ["unknown-key"]
    assert found["unknown-key"].works[0] == meant
    assert f"did you mean {meant}?" in found["unknown-key"].message


BATCH = "[batch]\nglobal_sequences = 1\nsequence_length = 8"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("extends = 3", "wrong-type"),
        ('extends = ""', "out-of-range"),
        (f"model = 3\n{BATCH}", "wrong-type"),
        (f"{BATCH}\n[model]\npreset = 'gpt2'\nrope_scaling = 8", "wrong-type"),
    ],
)
def test_what_hangs_on_a_wrong_value_is_not_said_to_be_missing(
    tmp_path: Path, text: str, rule: str
) -> None:
    found = problems_of(write(tmp_path, text))
    assert list(found) == [rule]


def test_an_unknown_table_is_reported_once_and_a_value_is_no_table(tmp_path: Path) -> None:
    run = write(tmp_path, SMALL + "\n[wandb]\nproject = 'x'\nentity = 'y'\nmode = 'z'\n")
    found = problems_of(run)
    assert list(found) == ["unknown-key"]
    assert found["unknown-key"].set_by == f"{run}:16"
    assert "is not a table" in problems_of("nano", ["mesh=3"])["wrong-type"].message


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
    assert found["no-such-file"].works == (str(there),)
    (tmp_path / "examples").mkdir()
    other = write(tmp_path / "examples", SMALL, "big.toml")
    found = problems_of(tmp_path / "exmples" / "big.toml")
    assert found["no-such-file"].works == (str(other),)
    assert "there is no folder" in found["no-such-file"].message
    (tmp_path / "boxes.toml").write_text("nodes = 1")
    found = problems_of("nano", [f"cluster.file={tmp_path / 'boxes'}"])
    assert found["no-such-file"].works == (str(tmp_path / "boxes.toml"),)
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
    assert hint in found["unknown-preset"].works


def test_an_unknown_run_lists_presets_and_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, SMALL)
    (tmp_path / "cluster.toml").write_text("devices_per_node = 8")
    (tmp_path / "pyproject.toml").write_text("[tool.ruff]")
    found = problems_of("nanoo")
    assert found["unknown-preset"].works == ("nano", "nano-zero3", "run.toml")
    found = problems_of("zzz")
    kinds = ("a run.toml", "a preset (echelon config presets)")
    assert found["unknown-preset"].works == (*kinds, "run.toml")
    for name in ("meta/Llama3-8B", "LLAMA3-8B"):
        assert problems_of(name)["unknown-preset"].works[0] == "llama3-8b"
    assert list(problems_of("./gone")) == ["unknown-preset"]
    found = problems_of(write(tmp_path, 'extends = "gpt3"'))
    assert "gpt3-175b" in found["unknown-preset"].works


def test_a_file_cannot_extend_itself(tmp_path: Path) -> None:
    write(tmp_path, 'extends = "b.toml"', "a.toml")
    write(tmp_path, 'extends = "a.toml"', "b.toml")
    found = problems_of(tmp_path / "a.toml")
    assert list(found) == ["extends-cycle"]
    assert "a.toml -> b.toml -> a.toml" in found["extends-cycle"].message


@pytest.mark.parametrize("text", ["mesh.tp 2", "=2", "mesh..tp=2", "extends=gpt2", ""])
def test_set_is_key_and_value(text: str) -> None:
    assert list(problems_of("nano", [text])) == ["set-syntax"]


def test_one_choice_is_not_made_twice(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    run = write(
        tmp_path,
        """
        extends = "nano"
        [model]
        preset = "gpt2"
        hf_config = "config.json"
        """,
    )
    found = problems_of(run)
    assert list(found) == ["conflicting-settings"]
    assert found["conflicting-settings"].set_by == f"{run}:3, {run}:4"
    found = problems_of("nano", ["cluster.preset=8xh100", "cluster.file=c.toml"])
    assert list(found) == ["conflicting-settings"]
    assert "conflicting-settings" in problems_of("nano", ["mesh.tp=1", "mesh.tp=2"])
    assert problems_of("nano", ["mesh.tp=2", "mesh.tp=2"]) == {}
    found = problems_of("nano", ["data.validation_fraction=0"])
    assert list(found) == ["conflicting-settings"]


def test_what_has_no_default_is_missed(tmp_path: Path) -> None:
    found = problems_of(write(tmp_path, "[mesh]\ntp = 1"))
    assert list(found) == ["missing-setting"]
    assert found["missing-setting"].key == "model"
    assert 'model.preset = "gpt2"' in found["missing-setting"].works
    run = write(tmp_path, SMALL.replace("vocab = 300", "").replace("layers = 6", ""))
    assert "missing-setting" in problems_of(run)
    found = problems_of(write(tmp_path, SMALL + "\n[model.experts]\nnum_experts = 4\nffn = 6\n"))
    assert found["missing-setting"].key == "model.experts.top_k"


ODD_VALUES = st.one_of(
    st.integers(),
    st.just(10**400),
    st.floats(),
    st.booleans(),
    st.text(max_size=8),
    st.lists(st.lists(st.integers(-2, 8), max_size=3), max_size=3),
    st.dictionaries(st.sampled_from(["tp", "x"]), st.integers(), max_size=2),
)


@settings(max_examples=250, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(SETTINGS)), ODD_VALUES, min_size=1, max_size=4))
def test_no_value_is_answered_by_anything_but_a_rule(values: dict[str, object]) -> None:
    sets = [f"{key}={toml_text(value)}" for key, value in values.items()]
    assert set(problems_of("nano", sets)) <= {rule.id for rule in all_rules()}


@pytest.mark.parametrize(
    "source",
    ["x" * 5000, "a\0b", "a\0.toml", "~nobody-here/run.toml", "no/such/place.toml", "/", "", "."],
)
def test_no_name_is_answered_by_anything_but_a_rule(source: str) -> None:
    assert set(problems_of(source)) <= {"no-such-file", "unknown-preset"}
    assert problems_of(source) != {}


@pytest.mark.parametrize("text", ["a = " + "[" * 10_000, "a = " + "9" * 10_000, "a = \x00"])
def test_hostile_files_are_not_toml(tmp_path: Path, text: str) -> None:
    run = tmp_path / "run.toml"
    run.write_text(text)
    assert list(problems_of(run)) == ["toml-syntax"]
    (tmp_path / "config.json").write_text(text.removeprefix("a = "))
    found = problems_of("nano", [f"model.hf_config={tmp_path}"])
    assert list(found) == ["hf-config-unreadable"]
