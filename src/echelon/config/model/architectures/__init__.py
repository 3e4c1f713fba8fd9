# SPDX-License-Identifier: Apache-2.0
"""Architectures of transformers: how a config.json of each is read, and how it says a shape.

common.py      an architecture, what many have in common, rotary positions
llama.py       Llama, Mistral, Qwen, SmolLM3, Granite, Gemma, OLMo 2
gemma.py       Gemma 2 and 3
gpt.py         GPT-2, StarCoder2, GPT-NeoX, Falcon; Phi-3, Phi-4 and GLM 4
mixtures.py    Mixtral, Qwen3-MoE, DeepSeek-V3
table.py       all of them, by model_type
"""
