"""The order of ranks' logs: equal calls in an order that can run, or the fault by its name."""

from __future__ import annotations

from echelon.rehearsal.order import (
    DEADLOCK,
    MISMATCH,
    MISSING,
    RECEIVE,
    SEND,
    Entry,
    Issue,
    OrderProof,
    RankLog,
    prove_order,
)

Calls = list[str]
"""What a rank does: `a` issues on communicator a of both, `a!` waits for the last one there,
`>1` sends to rank 1, `<0` receives from rank 0, `?` reads on the host."""


def log_of(rank: int, calls: Calls, *, opened: bool = True) -> list[Entry]:
    """Return the log of a rank of two; `opened` communicators have been called at the start."""
    log, last = RankLog(rank), dict[str, int]()
    names = dict.fromkeys(call.rstrip("!") for call in calls)
    calls_of = [
        message(rank, name) if name[0] in "<>" else issue(name) for name in names if name != "?"
    ]
    for one in sorted(calls_of, key=lambda one: one.communicator) if opened else ():
        log.wait(log.issue(one))
    for call in calls:
        if call == "?":
            log.host_read("item", "here.py:1", "F")
        elif call.endswith("!"):
            log.wait(last[call[:-1]])
        elif call[0] in "<>":
            last[call] = log.issue(message(rank, call))
        else:
            last[call] = log.issue(issue(call))
    return log.entries


def issue(name: str, num_bytes: int = 8) -> Issue:
    return Issue(
        communicator=name,
        members=(0, 1),
        kind="all_reduce",
        num_bytes=num_bytes,
        dtype="float32",
        name=name,
    )


def message(rank: int, call: str) -> Issue:
    other = int(call[1:])
    return Issue(
        communicator="pipe" if (call[0] == ">") == (rank < other) else "back",
        members=(min(rank, other), max(rank, other)),
        kind=SEND if call[0] == ">" else RECEIVE,
        num_bytes=8,
        dtype="float32",
        name=call,
        data="x",
    )


def proof_of(first: Calls, second: Calls, *, opened: bool = True) -> OrderProof:
    logs = {
        (rank,): log_of(rank, calls, opened=opened) for rank, calls in enumerate((first, second))
    }
    return prove_order(logs, lambda rank: (rank,))


def rules_of(first: Calls, second: Calls, *, opened: bool = True) -> list[str]:
    return [fault.rule for fault in proof_of(first, second, opened=opened).faults]


def test_equal_calls_hold() -> None:
    proof = proof_of(["a", "b", "a!", "b!"], ["a", "b", "b!", "a!"])
    assert not proof.faults
    assert proof.num_classes == 2
    assert proof.num_operations == 8


def test_two_communicators_in_two_orders_hold_unless_somebody_waits_between() -> None:
    assert rules_of(["a", "b", "a!", "b!"], ["b", "a", "a!", "b!"]) == []
    assert rules_of(["a", "a!", "b", "b!"], ["b", "b!", "a", "a!"]) == [DEADLOCK]


def test_a_circle_is_told_with_where_each_rank_stands() -> None:
    (fault,) = proof_of(["a", "a!", "b", "b!"], ["b", "b!", "a", "a!"]).faults
    assert "all_reduce a" in fault.text
    assert "all_reduce b" in fault.text
    assert "(0,)" in fault.text
    assert "(1,)" in fault.text


def test_a_communicator_that_opens_late_holds_the_host() -> None:
    """Neither waits for the other's collective; but the first call of each holds its host."""
    first, second = ["a", "b"], ["b", "a"]
    assert rules_of(first, second) == []
    assert rules_of(first, second, opened=False) == [DEADLOCK]


def test_messages_wait_for_their_other_end() -> None:
    assert rules_of([">1", "<1", "<1!"], ["<0", "<0!", ">0"]) == []
    assert rules_of(["<1", "<1!", ">1"], ["<0", "<0!", ">0"]) == [DEADLOCK]


def test_links_are_opened_in_one_order() -> None:
    """Each holds its host for the other: one for this way, one for the way back."""
    assert rules_of(["<1", ">1"], ["<0", ">0"], opened=False) == [DEADLOCK]
    assert rules_of([">1", "<1"], ["<0", ">0"], opened=False) == []


def test_a_send_must_meet_a_receive() -> None:
    logs = {(0,): [message(0, ">1")], (1,): [message(0, ">1")]}
    (fault,) = prove_order(logs, lambda rank: (rank,)).faults
    assert fault.rule == MISMATCH


def test_a_host_read_waits_for_what_the_stream_waits_for() -> None:
    """The host of rank 0 reads before it issues b, which rank 1 wants before it issues a."""
    assert rules_of(["a", "a!", "b", "b!"], ["b", "a", "a!", "b!"]) == []
    assert rules_of(["a", "a!", "?", "b"], ["b", "b!", "?", "a"]) == [DEADLOCK]


def test_calls_of_other_sizes_or_kinds_are_told() -> None:
    logs = {(0,): [issue("a")], (1,): [issue("a", 16)]}
    (fault,) = prove_order(logs, lambda rank: (rank,)).faults
    assert fault.rule == MISMATCH
    assert "8 bytes" in fault.text
    assert "16 bytes" in fault.text


def test_a_call_that_one_member_leaves_out_is_told() -> None:
    (fault,) = proof_of(["a", "a"], ["a"]).faults
    assert fault.rule == MISSING
    assert "nothing by ranks like (1,)" in fault.text


def test_one_log_stands_for_all_ranks_of_its_class() -> None:
    """Four ranks of two classes in two groups of two: each log is proven once."""
    logs = {(rank,): log_of(rank, ["a", "a!"]) for rank in (0, 1)}
    proof = prove_order(logs, lambda rank: (rank % 2,))
    assert not proof.faults
    assert proof.num_classes == 2
