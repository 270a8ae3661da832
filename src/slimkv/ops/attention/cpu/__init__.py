"""Attention on a CPU."""
