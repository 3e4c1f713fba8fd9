# SPDX-License-Identifier: Apache-2.0
"""`echelon explain`: what has an id, and pages that compute.

command.py          the flags; list the rules, or show a page of `PAGES` or of a word
entries.py          rules, lints and claims by id; the pages lints and errata
memory.py           bytes of a model, and the largest that fits; ZeRO's stages hold and send
pipeline.py         schedules: idle, held, messages
context.py          sequences split, for a run or without one
experts.py          experts, for a run or without one (expert_settings.toml)
choose.py           what guides advise
units.py            rates of devices and links
"""
