#!/bin/bash
# Eight processes, by the launcher of DeepSpeed.
deepspeed --num_nodes 2 --num_gpus 4 train.py --deepspeed_config ds_config.json
