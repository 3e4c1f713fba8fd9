"""Calls around a method of one object leave its class, and then the object, as they were."""

from __future__ import annotations

from echelon.proof.verify.placement.located import Interposed


class Engine:
    def __init__(self) -> None:
        self.done: list[str] = []

    def step(self, what: str) -> str:
        self.done.append(what)
        return what.upper()


def test_calls_are_made_before_and_after_until_they_are_removed() -> None:
    engine, told = Engine(), list[str]()
    around = Interposed(engine, "step", lambda: told.append("before"), told.append)
    assert engine.step("a") == "A"
    assert (told, Engine().step("b")) == (["before", "A"], "B")
    around.remove()
    assert "step" not in vars(engine)
    engine.step("c")
    assert (told, engine.done) == (["before", "A"], ["a", "c"])


def test_an_object_with_a_method_of_its_own_gets_it_back() -> None:
    engine = Engine()
    own = lambda what: f"own {what}"  # noqa: E731
    engine.step = own
    Interposed(engine, "step", lambda: None).remove()
    assert engine.step is own
