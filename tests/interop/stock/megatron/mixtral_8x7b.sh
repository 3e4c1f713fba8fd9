#!/bin/bash
# The settings of examples/mixtral/train_mixtral_8x7b_distributed.sh (Megatron-LM, main of August 2026), as facts.

GPUS=${GPUS:-8}
NODES=${NODES:-1}
ONE=(
    --attention-dropout 0.0
    --bf16
    --clip-grad 1.0
    --data-path $3
    --disable-bias-linear
    --eval-interval 1000
    --eval-iters 10
    --expert-model-parallel-size 8
    --ffn-hidden-size 14336
    --global-batch-size 256
    --group-query-attention
    --hidden-dropout 0.0
    --hidden-size 4096
    --init-method-std 0.01
    --load $1
    --log-interval 1
    --lr 1e-4
    --lr-decay-iters 320000
    --lr-decay-style cosine
)
TWO=(
    --lr-warmup-iters 500
    --max-position-embeddings 32768
    --micro-batch-size 1
    --min-lr 1.0e-5
    --moe-aux-loss-coeff 1e-2
    --moe-grouped-gemm
    --moe-router-load-balancing-type aux_loss
    --moe-router-topk 2
    --moe-token-dispatcher-type alltoall
    --no-load-optim
    --no-load-rng
    --no-masked-softmax-fusion
    --no-position-embedding
    --normalization RMSNorm
    --num-attention-heads 32
    --num-experts 8
    --num-layers 32
    --num-query-groups 8
    --overlap-grad-reduce
)
THREE=(
    --overlap-param-gather
    --pipeline-model-parallel-size 4
    --position-embedding-type rope
    --rotary-base 1000000
    --save $1
    --save-interval 10000
    --seq-length 4096
    --sequence-parallel
    --split 99990,8,2
    --swiglu
    --tensor-model-parallel-size 1
    --tensorboard-dir $1/tensorboard
    --tokenizer-model $2
    --tokenizer-type Llama2Tokenizer
    --train-iters 500000
    --untie-embeddings-and-output-weights
    --use-distributed-optimizer
    --use-mcore-models
    --weight-decay 0.1
)
torchrun --nproc_per_node $GPUS --nnodes $NODES pretrain_gpt.py \
    ${ONE[@]} \
    ${TWO[@]} \
    ${THREE[@]}
