"""gather: pages -> dense K and V, for an engine's own attention, for offload and for debugging."""
