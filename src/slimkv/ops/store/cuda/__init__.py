"""Storing tokens with CUDA C++."""
