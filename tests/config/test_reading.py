"""Lines of keys: whatever TOML allows between them."""

from __future__ import annotations

import tomllib
from inspect import cleandoc

from echelon.config.entries import flatten
from echelon.config.reading import key_lines, line_of

TEXT = cleandoc(
    '''
    # [not.a.table]
    extends = "nano"      # tp = 9
    model.layers = 4

    [mesh]   # comment
      tp = 2
    "pp" = 1

    [ pipeline ]
    stages = [
      [0, 1],   # ] tp = 3
      [2, 3],
    ]
    schedule = "a = [ # { 'b'"
    [train]
    run_name = """
    [mesh]
    cp = 4 \\"""
    """
    runs_dir = \'\'\'
    steps = 3
    \'\'\'
    steps = 7
    [model.rope_scaling]
    factor = 8.0
    [model . latent]
    kv_rank = 3
    [experts]
    balance = { x = 1, y = { z = 2 } }
    [[links]]
    name = 'a # b'
    '''
)


def test_every_key_has_its_line() -> None:
    lines = key_lines(TEXT)
    rows = TEXT.splitlines()
    flat = dict(flatten(tomllib.loads(TEXT)))
    assert len(flat) >= 13
    for key in flat:
        line = line_of(key, lines)
        assert line is not None, key
        name = key.split(".")[-1] if key in lines else key.split(".")[1]
        assert name in rows[line - 1], key
    assert lines["extends"] == 2
    assert lines["mesh.tp"] == 6
    assert lines["pipeline.stages"] == 10
    assert lines["pipeline.schedule"] == 14
    assert lines["train.steps"] == 23
    assert lines["model.latent.kv_rank"] == 27
    assert "mesh.cp" not in lines
    assert "not.a.table" not in lines


def test_a_key_that_is_not_there_has_no_line() -> None:
    assert line_of("zero.stage", key_lines(TEXT)) is None
