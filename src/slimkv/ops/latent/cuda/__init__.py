"""Latent attention in CUDA C++ for Hopper: how the kernel is cut and launched."""
