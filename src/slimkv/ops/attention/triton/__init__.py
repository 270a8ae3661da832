"""Attention with Triton: kernels for decode and prefill, and their launcher."""
