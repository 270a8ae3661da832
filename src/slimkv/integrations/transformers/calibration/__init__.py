"""Calibration with transformers: the tokens to read, the statistics, and where they are saved."""
