# SPDX-License-Identifier: Apache-2.0
"""Settings of a model.

settings.py       presets and config.json expanded, the rest derived -> ModelShape, Lora
hugging_face.py   a config.json -> settings, and back
unknown.py        one whose model_type is not known: what is assumed of it
architectures/    those that are known
"""
