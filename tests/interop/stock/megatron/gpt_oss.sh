#!/bin/bash
# The settings of examples/gptoss/02_train.sh (Megatron-LM, main of August 2026), as facts.

GPUS=${GPUS:-8}
NODES=${NODES:-1}
ONE=(
    --accumulate-allreduce-grads-in-fp32
    --activation-func-clamp-value 7.0
    --attention-softmax-in-fp32
    --bf16
    --clip-grad 1.0
    --context-parallel-size 1
    --data-cache-path ${PWD}/benchmark_cache_gpt_oss_20b
    --disable-bf16-reduced-precision-matmul
    --disable-bias-linear
    --enable-gpt-oss
    --eval-interval 50000000
    --eval-iters 0
    --expert-model-parallel-size 1
    --export-force-local-attention
    --ffn-hidden-size 2048
    --fp8-amax-compute-algo max
    --fp8-amax-history-len 1024
    --fp8-format hybrid
    --fp8-param-gather
    --global-batch-size 128
    --glu-linear-offset 1.0
    --group-query-attention
    --hidden-size 512
    --log-interval 1
    --log-throughput
    --lr 1.0e-5
    --lr-decay-samples 1949218748
    --lr-decay-style cosine
    --lr-warmup-fraction 0.05
)
TWO=(
    --max-position-embeddings 8192
    --micro-batch-size 1
    --min-lr 1.0e-6
    --mock-data
    --moe-aux-loss-coeff 1e-3
    --moe-ffn-hidden-size 2048
    --moe-grouped-gemm
    --moe-per-layer-logging
    --moe-permute-fusion
    --moe-router-dtype fp32
    --moe-router-load-balancing-type aux_loss
    --moe-router-topk 2
    --moe-token-dispatcher-type alltoall
    --moe-z-loss-coeff 1e-3
    --no-bias-dropout-fusion
    --no-bias-gelu-fusion
    --no-create-attention-mask-in-dataloader
    --no-load-optim
    --no-load-rng
    --no-masked-softmax-fusion
    --no-mmap-bin-files
    --no-rope-fusion
    --normalization RMSNorm
    --num-attention-heads 64
    --num-experts 4
    --num-layers 12
    --num-query-groups 8
    --num-workers 1
    --overlap-grad-reduce
)
THREE=(
    --overlap-param-gather
    --pipeline-model-parallel-size 8
    --position-embedding-type rope
    --quick-geglu
    --recompute-activations
    --rope-type rope
    --rotary-base 10000
    --rotary-percent 1.0
    --save NO_VALUE_PROVIDED
    --save-interval 10000
    --seq-length 8192
    --sequence-parallel
    --softmax-type learnable
    --split "'99,1,0'"
    --tensor-model-parallel-size 1
    --tensorboard-dir NO_VALUE_PROVIDED/tensorboard
    --tiktoken-pattern v2
    --tokenizer-type NullTokenizer
    --train-samples 1953125000
    --transformer-impl transformer_engine
    --untie-embeddings-and-output-weights
    --use-distributed-optimizer
    --use-flash-attn
    --use-mcore-models
    --vocab-size 128256
    --weight-decay 0.1
    --window-attn-skip-freq 2
    --window-size 127,0
)
torchrun --nproc_per_node $GPUS --nnodes $NODES pretrain_gpt.py \
    ${ONE[@]} \
    ${TWO[@]} \
    ${THREE[@]}
