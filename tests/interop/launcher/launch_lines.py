"""Launch lines and files of other tools, for tests."""

HOROVOD = "horovodrun -np 4 -H localhost:4 python pytorch_mnist.py --batch-size 64 --fp16-allreduce"
MEGATRON = (
    "torchrun --nproc_per_node {ranks} pretrain_gpt.py --num-layers 4 --hidden-size 512 "
    "--num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024 "
    "--micro-batch-size 1 --global-batch-size 8 --bf16 --attention-dropout 0 "
    "--vocab-size 32000 --tokenizer-type NullTokenizer --train-iters 10 --lr 1e-4"
)
DEEPSPEED = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 1}
ACCELERATE = "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\nnum_processes: {ranks}\n"
