# SPDX-License-Identifier: Apache-2.0
"""Architectures of transformers: how a config.json of each is read, and how a shape is said in it.

record.py      what is known of one          common.py    what many have in common
llama.py       Llama, Mistral, Qwen, SmolLM3, Granite, Gemma, OLMo 2
fused.py       Phi-3 and Phi-4, GLM 4: matrices that files put together
gemma.py       Gemma 2 and 3
rotary.py      how positions turn, and what stretches them
gpt.py         GPT-2, StarCoder2, GPT-NeoX, Falcon
mixtures.py    Mixtral, Qwen3-MoE, DeepSeek-V3
table.py       all of them, by model_type
"""
