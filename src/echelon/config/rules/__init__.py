# SPDX-License-Identifier: Apache-2.0
"""What must hold between settings: one mechanism, over one View of a run's settings or of a Plan.

The rule that refused is found by its id in one file: a finder reads the View and yields the
violations of its rules, each with the arithmetic and ways to mend it.

    violations.py    RuleViolation, and how finders are asked: violations -> problems
    suggestions.py   Trial: a way to mend is told where finders find it mended, in a changed View
    finders.py       FINDERS, the list of all in the order of telling; PLAN_FINDERS, of a Plan
    plan.py          require_trainable: a Plan's values, rules and schedule; its folder of files

    mesh.py          tensor degree, sequence, batch; a mesh setting without effect
    world_size.py    ranks that were started, devices that there are; meshes that fit
    model.py         heads, positions, vocabulary      model_parts.py   experts, latent attention
    pipeline.py      schedules, and those of files     stages.py        blocks of stages, times
    zero.py          stages, offload, folders          context.py       parts of a sequence, heads
    precision.py     dtypes, loss scaling              training.py      optimizer, recompute, run
    fine_tuning/     lora.py adapters beside layers
    experts/         mesh.py who holds them, dispatch.py how tokens travel, balance.py how evenly

A rule's id, reason and examples stand in `core/rulebook/`. A Plan becomes a View in
`config/plan_view.py`; `config/load.py` asks FINDERS of the settings of a run.
"""
