# SPDX-License-Identifier: Apache-2.0
"""Proof: a program is run beside one device, tensor by tensor, and every difference is named.

Both sides are one record, `evidence/`: our engine fills it with a plan's promises beside, any other
program by hooks. One list of claims judges it, and one room of causes names what is wrong. Each of
these imports those above it only (`.importlinter`):

subject.py          the thing under proof: what is asked of a training engine
shrink.py           a plan made small, with all kept that can go wrong, and the steps of its proof
changes.py          what a small plan has of the given one, and what must not be mended in it
evidence/           one device and the ranks of any program; how far off they may be
sum_bounds.py       bounds of sums that are rounded on their way
oracle/             the same training on one device, in plain code
ranks.py            what each rank does in a proof, and the files that it writes
observed.py         what the ranks said, put together: whole tensors, losses, routes
late.py             the run with late completion beside it
claims/             what must hold, and how far off it may be
causes/             the first wrong thing: its tensor, factor and axis (diagnose.py)
verdict.py          the proof as a value: claims in each precision, and what is wrong
deviations.py       how far off each claim was, as a table, and the sums that a plan cuts into parts
replays/            runs of asynchronous servers, and that lose an island: records, replays, claims
verify/             prove a program that is not ours, in any framework, by what hooks capture
bisect/             the smallest run that fails as a given one does
independent/        a second, plain implementation to prove the oracle by
run.py              prove: shrink the plan, run its ranks and the oracle, judge every claim
whole_run/          a whole run of the trainer, from data to text, beside one device
"""
