"""latent: what MLA models keep of a token (a latent for all heads, and a rope part), stored and attended packed."""
