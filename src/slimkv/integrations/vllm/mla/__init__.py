"""Latent attention (MLA) in vLLM: the backend for latents, selected by the model."""
