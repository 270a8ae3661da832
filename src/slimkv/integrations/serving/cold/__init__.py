"""Shared by the cold tiers of vLLM and SGLang: converts an engine's own K and V to packed pages and back."""
