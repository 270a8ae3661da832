"""Attention with CUDA C++: launchers of the kernels under ``slimkv.ops.cuda``."""
