"""The compiled library of the CPU backends."""
