#!/bin/bash
# The settings of examples/megatron_fsdp/train_llama3_8b_fsdp_h100_fp8.sh (Megatron-LM, main of August 2026), as facts.

GPUS=${GPUS:-8}
NODES=${NODES:-1}
ONE=(
    --adam-beta1 0.9
    --adam-beta2 0.95
    --apply-layernorm-1p
    --attention-backend fused
    --attention-dropout 0.0
    --bf16
    --calculate-per-token-loss
    --ckpt-format fsdp_dtensor
    --clip-grad 1.0
    --context-parallel-size 1
    --cross-entropy-loss-fusion
    --data-cache-path ${PWD}/benchmark_cache_llama3_8b_fsdp_fp8
    --data-parallel-sharding-strategy optim_grads_params
    --decoupled-lr 5.0e-4
    --decoupled-min-lr 4.5e-5
    --disable-bias-linear
    --distributed-timeout-minutes 60
    --empty-unused-memory-level 1
    --eval-interval 100
    --eval-iters 32
    --exit-duration-in-mins 235
    --ffn-hidden-size 14336
    --fp8-amax-compute-algo max
    --fp8-amax-history-len 1024
    --fp8-format hybrid
    --fp8-param-gather
    --fsdp-double-buffer
)
TWO=(
    --fsdp-manual-registration
    --global-batch-size 128
    --group-query-attention
    --hidden-dropout 0.0
    --hidden-size 4096
    --init-method-std 0.0134
    --init-model-with-meta-device
    --kv-channels 128
    --load checkpoints/llama3_8b_fsdp_fp8
    --log-interval 1
    --log-throughput
    --logging-level 20
    --lr 0.00015
    --lr-decay-samples 1949218748
    --lr-decay-style cosine
    --lr-warmup-samples 3906252
    --manual-gc
    --max-position-embeddings 8192
    --micro-batch-size 1
    --min-lr 0.00001
    --mock-data
    --no-check-for-nan-in-loss-and-grad
    --no-create-attention-mask-in-dataloader
    --no-gradient-accumulation-fusion
    --no-mmap-bin-files
    --normalization RMSNorm
    --num-attention-heads 32
)
THREE=(
    --num-layers 32
    --num-query-groups 8
    --num-workers 1
    --overlap-grad-reduce
    --overlap-param-gather
    --position-embedding-type rope
    --rotary-base 1000000
    --rotary-percent 1.0
    --save checkpoints/llama3_8b_fsdp_fp8
    --save-interval 1000
    --seq-length 8192
    --sequence-parallel
    --split "'99,1,0'"
    --swiglu
    --tensor-model-parallel-size 1
    --tensorboard-dir tensorboard_logs/llama3_8b_fsdp_fp8
    --tiktoken-pattern v2
    --tokenizer-type NullTokenizer
    --train-samples 1953125000
    --untie-embeddings-and-output-weights
    --use-distributed-optimizer
    --use-mcore-models
    --use-megatron-fsdp
    --use-nccl-ub
    --vocab-size 128256
    --weight-decay 0.1
)
torchrun --nproc_per_node $GPUS --nnodes $NODES pretrain_gpt.py \
    ${ONE[@]} \
    ${TWO[@]} \
    ${THREE[@]}
