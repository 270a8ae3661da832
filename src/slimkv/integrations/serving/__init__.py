"""Shared by serving engines: the served model, calibration inside an engine, parts of a step."""
