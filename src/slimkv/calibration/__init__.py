"""calibration: statistics of a model's queries, the file they are kept in, and the widths that follow from them.

Nothing here knows an engine; each of ``slimkv.integrations`` gathers the statistics of its own models.
"""

from slimkv.calibration.calibration import Calibration
from slimkv.calibration.identity import ModelIdentity
from slimkv.calibration.statistics import LayerStatistics

__all__ = ["Calibration", "LayerStatistics", "ModelIdentity"]
