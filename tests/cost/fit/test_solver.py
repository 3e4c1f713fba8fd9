"""The bounded fit: planted constants are found, noise never leaves the bounds, priors hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.cost.fit.solver import Array, Constant, ConstantValues, Fit, Groups, fit
from tests.walks import examples

SIZES = np.geomspace(1e3, 1e9, 24)
CONSTANTS = (
    Constant(name="latency_s", low=1e-7, high=1e-2, prior=1e-5, width=2.0),
    Constant(name="share", low=0.01, high=1.0, prior=0.7, width=0.7),
)


def _seconds(values: ConstantValues) -> Array:
    return values["latency_s"] + SIZES / (values["share"] * 1e10)


def _fit(measured: Array) -> Fit:
    return fit(CONSTANTS, _seconds, measured.tolist())


@given(
    latency_s=st.floats(3e-6, 1e-3),
    share=st.floats(0.1, 0.95),
)
@settings(max_examples=examples(25), deadline=None)
def test_planted_constants_are_found(latency_s: float, share: float) -> None:
    found = _fit(_seconds({"latency_s": latency_s, "share": share}))
    assert found.values["latency_s"] == pytest.approx(latency_s, rel=0.05)
    assert found.values["share"] == pytest.approx(share, rel=0.05)
    assert max(map(abs, found.errors)) < 0.05
    assert found.at_bound == ()


@given(seed=st.integers(0, 1000), noise=st.floats(0.0, 1.5), scale=st.floats(1e-4, 1e4))
@settings(max_examples=examples(25), deadline=None)
def test_no_noise_makes_a_constant_leave_its_bounds(seed: int, noise: float, scale: float) -> None:
    random = np.random.default_rng(seed)
    true = _seconds({"latency_s": 2e-5, "share": 0.6})
    found = _fit(scale * true * np.exp(noise * random.standard_normal(true.size)))
    for one in CONSTANTS:
        assert one.low * (1 - 1e-9) <= found.values[one.name] <= one.high * (1 + 1e-9)
    assert np.all(np.isfinite(found.errors))


def test_a_bad_sample_pulls_little() -> None:
    true = _seconds({"latency_s": 2e-5, "share": 0.6})
    true[20] *= 8.0
    found = _fit(true)
    assert found.values["share"] == pytest.approx(0.6, rel=0.1)
    assert found.errors[20] == pytest.approx(-7 / 8, abs=0.02)


def test_a_constant_without_samples_stays_at_its_prior() -> None:
    idle = Constant(name="idle", low=0.1, high=10.0, prior=3.0)
    true = _seconds({"latency_s": 2e-5, "share": 0.6})
    found = fit((*CONSTANTS, idle), _seconds, true.tolist())
    assert found.values["idle"] == pytest.approx(3.0, rel=1e-6)


def test_a_machine_faster_than_its_peak_ends_at_the_bound() -> None:
    found = _fit(_seconds({"latency_s": 2e-5, "share": 5.0}))
    assert found.values["share"] == pytest.approx(1.0)
    assert found.at_bound == ("share",)


@pytest.mark.parametrize("seconds", [[], [1.0, 0.0], [1.0, float("nan")], [-1.0]])
def test_times_must_be_positive(seconds: list[float]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        fit(CONSTANTS, lambda _values: np.ones(len(seconds)), seconds)


def test_a_constant_without_samples_follows_its_parent() -> None:
    """Of two trainers of a family, what the runs of one tell is what is expected of the other."""
    parent = Constant(name="family", low=0.01, high=100.0, prior=1.0, width=2.0)
    known, unknown = (
        Constant(name=name, low=0.01, high=100.0, prior=prior, width=0.2, parent="family")
        for name, prior in (("known", 1.0), ("unknown", 2.0))
    )
    found = fit((parent, known, unknown), lambda values: values["known"] * SIZES, [*(5.0 * SIZES)])
    assert found.values["known"] == pytest.approx(5.0, rel=0.02)
    assert found.values["family"] == pytest.approx(5.0, rel=0.1)
    assert found.values["unknown"] / found.values["family"] == pytest.approx(2.0, rel=0.01)


def test_a_group_with_many_samples_does_not_speak_for_all() -> None:
    """Ninety samples of one source tell of its level as little as two sources of one each do."""
    true = np.ones(92)
    true[:90] *= 2.0
    only = Constant(name="level", low=0.01, high=100.0, prior=1.0, width=10.0)
    numbers = np.array([0] * 90 + [1, 2])
    alone = fit((only,), lambda values: values["level"] * np.ones(92), true.tolist())
    together = fit(
        (only,),
        lambda values: values["level"] * np.ones(92),
        true.tolist(),
        weights=Groups(numbers=numbers, alone=0.15, shared=15.0),
    )
    assert alone.values["level"] == pytest.approx(2.0, rel=0.05)
    assert together.values["level"] < 1.7


def test_what_a_group_shares_is_made_smaller_and_differences_stay() -> None:
    groups = Groups(numbers=np.array([0, 0, 1]), alone=0.1, shared=0.2)
    settled = groups.settled(np.array([1.0, 3.0, 4.0]))
    assert settled[1] - settled[0] == pytest.approx(2.0)
    assert settled[:2].mean() == pytest.approx(2.0 / 3.0)
    assert settled[2] == pytest.approx(4.0 / np.sqrt(5.0))


def test_constants_that_share_no_sample_can_be_moved_at_once() -> None:
    first = np.array([True, True, False, False])
    sizes = np.array([1.0, 2.0, 3.0, 4.0])
    constants = [Constant(name=name, low=0.1, high=10.0, prior=1.0) for name in ("a", "b")]

    def predict(values: ConstantValues) -> Array:
        return sizes * np.where(first, values["a"], values["b"])

    measured = [2.0, 4.0, 9.0, 12.0]
    together = {"a": ("rate", first), "b": ("rate", ~first)}
    apart = fit(constants, predict, measured)
    found = fit(constants, predict, measured, together=together, start={"a": 1.0, "b": 1.0})
    assert found.values == pytest.approx(apart.values, rel=1e-3)
    assert found.values["b"] > found.values["a"] > 1.5
