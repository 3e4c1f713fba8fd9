# SPDX-License-Identifier: Apache-2.0
"""Settings of a model.

settings.py       presets and config.json expanded, the rest derived -> ModelShape, Lora
hugging_face.py   a config.json -> settings, and back; what is assumed where it is not known
architectures/    architectures that are known
"""
