"""Shared by serving engines: the served model, how its layers store and check keys, calibration inside an engine."""
