#!/bin/bash
# A command of Megatron-LM, as its examples write it: echelon import examples/foreign/train_gpt.sh
GPUS_PER_NODE=8
NUM_NODES=2
MODEL_ARGS=(
    --num-layers 4 --hidden-size 128 --num-attention-heads 8
    --seq-length 128 --max-position-embeddings 128 --vocab-size 500
    --attention-dropout 0 --hidden-dropout 0
)
TRAINING_ARGS=(
    --micro-batch-size 1 --global-batch-size 32 --lr 3e-4 --train-iters 20
    --recompute-activations --bf16 --rampup-batch-size 8 8 1000
)
torchrun --nnodes $NUM_NODES --nproc_per_node $GPUS_PER_NODE pretrain_gpt.py \
    ${MODEL_ARGS[@]} ${TRAINING_ARGS[@]} \
    --tensor-model-parallel-size 2 --data-path $1 --tensorboard-dir logs
