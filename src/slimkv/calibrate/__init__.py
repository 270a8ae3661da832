"""calibrate: statistics of a model's queries, the file they are kept in, and the widths that follow from them.

Nothing here knows an engine; ``slimkv.integrations.transformers`` gathers the statistics.
"""

from slimkv.calibrate.calibration import Calibration
from slimkv.calibrate.identity import ModelIdentity
from slimkv.calibrate.statistics import LayerStatistics

__all__ = ["Calibration", "LayerStatistics", "ModelIdentity"]
