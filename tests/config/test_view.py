"""Typed access to settings: defaults, what is wrong or missing, and where each was set."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.config.entries import Entry
from echelon.config.view import Unavailable, View, data_ranks, gradient_ranks, mesh_of, record
from echelon.core.mesh import Mesh
from echelon.core.plan import Recompute


def view_of(*wrong: str, **values: object) -> View:
    """Return settings of a file in `a`; "mesh__tp" stands for mesh.tp."""
    entries = {
        key.replace("__", "."): Entry(value=value, source=f"a/run.toml:{line}", folder=Path("a"))
        for line, (key, value) in enumerate(values.items(), 1)
    }
    return View(entries=entries, wrong=frozenset(wrong))


def test_a_value_is_what_was_set_else_its_default() -> None:
    view = view_of(mesh__tp=2, optimizer__weight_decay=0, data__source="text")
    assert (view.integer("mesh.tp"), view.integer("mesh.pp")) == (2, 1)
    assert view.flag("mesh.sequence_parallel") is False
    # A number is a float wherever it came from.
    assert isinstance(view.number("optimizer.weight_decay"), float)
    assert view.path("data.source") == Path("a/text")
    assert (view.is_default("mesh.tp"), view.is_default("mesh.pp")) == (False, True)
    assert view.stage_lists() is None
    assert view_of(pipeline__stages=[[0], [1, 2]]).stage_lists() == [[0], [1, 2]]


def test_what_is_wrong_or_missing_is_not_available() -> None:
    view = view_of("mesh.tp", mesh__tp=0)
    assert not view.has("mesh.tp")
    assert not view.has("model.layers")
    for ask in (
        lambda: view.integer("mesh.tp"),
        lambda: view.integer("model.layers"),
        lambda: view.has_table("mesh"),
        lambda: mesh_of(view),
    ):
        with pytest.raises(Unavailable):
            ask()
    assert view.model_name == "the model"
    assert view_of(model__name="nano").model_name == "nano"


def test_where_settings_were_set_is_told_with_their_names_where_there_are_several() -> None:
    view = view_of(mesh__tp=2, mesh__pp=2)
    assert view.set_by("mesh.tp") == "a/run.toml:1"
    assert view.set_by("mesh.tp", "mesh.pp", "mesh.cp") == (
        "a/run.toml:1 (mesh.tp), a/run.toml:2 (mesh.pp)"
    )
    assert view.set_by("mesh.cp") == "default"


def test_ranks_are_products_of_degrees_and_a_record_is_its_table() -> None:
    view = view_of(mesh__dp_replicate=2, mesh__dp_shard=4, mesh__cp=2, mesh__tp=8)
    assert mesh_of(view) == Mesh(dp_replicate=2, dp_shard=4, cp=2, tp=8)
    assert (data_ranks(view), gradient_ranks(view)) == (8, 16)
    made = record(view_of(recompute__policy="full"), Recompute, "recompute", every=3)
    assert (made.policy, made.every, made.offload) == ("full", 3, "none")
