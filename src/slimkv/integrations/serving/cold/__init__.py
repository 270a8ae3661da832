"""What the cold tiers of vLLM and SGLang share: K and V of an engine's own cache <-> packed pages."""
