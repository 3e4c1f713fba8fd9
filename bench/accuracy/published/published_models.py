"""Sizes of published models that are no presets, from each one's config.json or paper.

A line is: name, layers, hidden, heads, kv heads, width of the MLP, vocabulary; then what is unlike
Llama: `plain` (no gated MLP), `dim=` of a head, `tied`, and of experts `experts=` number / of a
token / width / shared / dense layers before, of latent attention `latent=` ranks of queries and of
keys / dims without and with rotation / of values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

TABLE = """
llama-7b 32 4096 32 32 11008 32000
llama-13b 40 5120 40 40 13824 32000
llama-33b 60 6656 52 52 17920 32000
llama-65b 80 8192 64 64 22016 32000
llama2-34b 48 8192 64 8 22016 32000
llama3.2-1b 16 2048 32 8 8192 128256 tied
llama3.2-3b 28 3072 24 8 8192 128256 tied
llama3.3-70b 80 8192 64 8 28672 128256
opt-175b 96 12288 96 96 49152 50272 plain
bloom-176b 70 14336 112 112 57344 250880 plain
gpt-neox-20b 44 6144 64 64 24576 50432 plain
gptj-6b 28 4096 16 16 16384 50400 plain
mt-nlg-530b 105 20480 128 128 81920 50257 plain
falcon-40b 60 8192 128 8 32768 65024 plain
falcon-180b 80 14848 232 8 59392 65024 plain
palm-540b 118 18432 48 1 73728 256000 dim=256 tied
mpt-7b 32 4096 32 32 16384 50432 plain
mpt-30b 48 7168 64 64 28672 50432 plain
nemotron4-15b 32 6144 48 8 24576 256000 plain
nemotron4-340b 96 18432 96 8 73728 256000 plain
gemma-7b 28 3072 16 16 24576 256000 dim=256 tied
gemma2-9b 42 3584 16 8 14336 256000 dim=256 tied
gemma2-27b 46 4608 32 16 36864 256000 dim=128 tied
gemma3-27b 62 5376 32 16 21504 262144 dim=128 tied
qwen2.5-7b 28 3584 28 4 18944 152064
qwen2.5-14b 48 5120 40 8 13824 152064
qwen2.5-32b 64 5120 40 8 27648 152064
qwen2.5-72b 80 8192 64 8 29568 152064
olmo-7b 32 4096 32 32 11008 50304
olmo2-7b 32 4096 32 32 11008 100352
olmo2-13b 40 5120 40 40 13824 100352
olmo2-32b 64 5120 40 8 27648 100352
internlm-7b 32 4096 32 32 11008 103168
internlm-20b 60 5120 40 40 13824 103168
yi-34b 60 7168 56 8 20480 64000
phi3-14b 40 5120 40 10 17920 32064
smollm3-3b 36 2048 16 4 11008 128256 tied
mixtral-8x22b 56 6144 48 8 16384 32768 experts=8/2/16384/0/0
grok-1 64 6144 48 8 32768 131072 experts=8/2/32768/0/0
dbrx 40 6144 48 8 10752 100352 experts=16/4/10752/0/0
gpt-oss-20b 24 2880 64 8 2880 201088 dim=64 experts=32/4/2880/0/0
gpt-oss-120b 36 2880 64 8 2880 201088 dim=64 experts=128/4/2880/0/0
olmoe-7b 16 2048 16 16 1024 50304 experts=64/8/1024/0/0
qwen2-57b-a14b 28 3584 28 4 18944 151936 experts=64/8/2560/8/0
qwen3-next-80b-a3b 48 2048 16 2 5120 151936 dim=256 experts=512/10/512/1/0
qwen3-coder-480b-a35b 62 6144 96 8 8192 151936 dim=128 experts=160/8/2560/0/0
glm-4.5-355b 92 5120 96 8 12288 151552 dim=128 experts=160/8/1536/1/3
llama4-scout 48 5120 40 8 16384 202048 experts=16/1/8192/1/0
llama4-maverick 48 5120 40 8 16384 202048 experts=64/1/8192/1/0
nemotron3-nano 52 2688 32 2 1856 131072 dim=128 plain experts=128/6/1856/2/29
deepseek-moe-16b 28 2048 16 16 10944 102400 experts=64/6/1408/2/1
deepseek-v2-lite 27 2048 16 16 10944 102400 experts=64/6/1408/2/1 latent=0/512/128/64/128
deepseek-v2 60 5120 128 128 12288 102400 experts=160/6/1536/2/1 latent=1536/512/128/64/128
deepseek-r1 61 7168 128 128 18432 129280 experts=256/8/2048/1/3 latent=1536/512/128/64/128
kimi-k2 61 7168 64 64 18432 163840 experts=384/8/2048/1/1 latent=1536/512/128/64/128
"""


@cache
def published_models() -> Mapping[str, Mapping[str, Any]]:
    """Return the models of the table, as tables of a preset's [model]."""
    return {line.split()[0]: _sizes(line.split()) for line in TABLE.strip().splitlines()}


def _sizes(words: Sequence[str]) -> Mapping[str, Any]:
    names = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
    found: dict[str, Any] = dict(zip(names, map(int, words[1:7]), strict=True))
    found["gated"] = True
    for word in words[7:]:
        key, _, value = word.partition("=")
        parts = [int(part) for part in value.split("/") if part]
        match key:
            case "plain":
                found["gated"] = False
            case "tied":
                found["tied"] = True
            case "dim":
                found["head_dim"] = parts[0]
            case "experts":
                keys = ("num_experts", "top_k", "ffn", "shared_experts", "first_dense_layers")
                found["experts"] = dict(zip(keys, parts, strict=True))
            case "latent":
                keys = ("query_rank", "kv_rank", "nope_dim", "rope_dim", "value_dim")
                found["latent"] = dict(zip(keys, parts, strict=True))
            case _:
                raise AssertionError(word)
    return found
