"""Latent attention in CUDA C++ for Hopper: configuration and launch."""
