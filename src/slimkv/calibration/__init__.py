"""calibrate: statistics of a model's queries, the file they are kept in, and the widths that follow from them.

Nothing here knows an engine; ``slimkv.integrations.transformers`` gathers the statistics.
"""

from slimkv.calibration.calibration import Calibration
from slimkv.calibration.identity import ModelIdentity
from slimkv.calibration.statistics import LayerStatistics

__all__ = ["Calibration", "LayerStatistics", "ModelIdentity"]
