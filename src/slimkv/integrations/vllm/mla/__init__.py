"""Latent attention (MLA) in vLLM: the backend beside that for K and V, chosen by the model."""
