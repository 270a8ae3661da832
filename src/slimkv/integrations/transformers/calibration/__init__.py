"""Calibrating a model that transformers runs: what it reads, the statistics it leaves, and where they are kept."""
