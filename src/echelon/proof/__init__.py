# SPDX-License-Identifier: Apache-2.0
"""Proof: a plan is run beside one device, tensor by tensor, and every difference is named.

run.py              prove: shrink the plan, run its ranks and the oracle, judge every claim
subject.py          the thing under proof: what is asked of a training engine
ranks.py            what each rank does in a proof, and the files that it writes
activations.py      what ranks say of activations, as it travels
observed.py         what the ranks said, put together: whole tensors, losses, routes
late.py             the run with late completion beside it
shrink.py           a plan made small, with all kept that can go wrong, and the steps of its proof

oracle/             the same training on one device, in plain code
claims/             what must hold, and how far off it may be
causes/             the first wrong thing: its tensor, factor and axis (diagnose.py)
verdict.py          the proof as a value: claims in each precision, and what is wrong
independent/        a second, plain implementation to prove the oracle by
whole_run/          a whole run of the trainer, from data to text, beside one device
bisect/             the smallest run that fails as a given one does
verify/             the same for programs that are not ours, in any framework
"""
