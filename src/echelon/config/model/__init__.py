# SPDX-License-Identifier: Apache-2.0
"""Settings of a model.

keys.py           its tables and keys
settings.py       presets and config.json expanded, the rest derived -> ModelShape
hugging_face.py   a config.json -> settings       config_json.py   how it is read
unknown.py        one whose model_type is not known: what is assumed of it
architectures/    those that are known
"""
