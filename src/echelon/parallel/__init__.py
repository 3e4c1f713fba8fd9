"""The parallelisms: one file each, on `torch.distributed`."""
