"""What serving engines share: the model that is served, calibration inside an engine, parts of a step."""
