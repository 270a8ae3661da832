"""latent: what MLA models keep of a token (a latent that all heads share, and a rope part), stored and attended packed."""
