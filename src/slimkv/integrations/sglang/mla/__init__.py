"""Latent attention (MLA) in SGLang: the pool and the backend beside those for K and V, chosen by the model."""
