"""latent: attention of MLA models on packed tokens: a latent and a rope part that all heads share."""
