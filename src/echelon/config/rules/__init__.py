# SPDX-License-Identifier: Apache-2.0
"""What must hold between settings: one mechanism, over one View of a run's settings or of a Plan.

The rule that refused is found by its id in one file: a finder reads the View and yields the
violations of its rules, each with the arithmetic and ways to mend it.

    violations.py    RuleViolation, how finders are asked, Trial: ways to mend that were tried
    finders.py       FINDERS, the list of all in the order of telling; PLAN_FINDERS, of a Plan;
                     require_trainable: a Plan's values, rules and schedule; its folder of files

    mesh.py          tensor degree, sequence, batch, collectives, devices; meshes that fit
    context.py       parts of a sequence, heads        experts.py      who holds them, dispatch
    model.py         heads, vocabulary, latent parts   blocks.py       norms, adapters, kernels
    pipeline.py      schedules, stages, times          zero.py         stages, offload, int8
    precision.py     dtypes, loss scaling, fp8         training.py     optimizer, recompute, data
    islands.py       local SGD                         servers.py      parameter servers

A rule's id, reason and examples stand in `core/rulebook/`. A Plan becomes a View in
`config/plan_view.py`; `config/load.py` asks FINDERS of the settings of a run.
"""
