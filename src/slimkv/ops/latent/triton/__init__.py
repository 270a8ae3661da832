"""Latent attention with Triton: the kernels and their launcher."""
