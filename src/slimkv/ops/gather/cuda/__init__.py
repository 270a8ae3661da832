"""gather in CUDA C++."""
