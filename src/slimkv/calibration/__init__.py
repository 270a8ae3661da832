"""Calibration: statistics of a model's queries, their file, and the widths derived from them.

Nothing here depends on an engine; each of ``slimkv.integrations`` collects the statistics of its models.
"""

from slimkv.calibration.calibration import Calibration
from slimkv.calibration.identity import ModelIdentity
from slimkv.calibration.statistics import LayerStatistics

__all__ = ["Calibration", "LayerStatistics", "ModelIdentity"]
