"""A real server under abuse: random load, cancellations, preemption; then what must still be true of it."""

from slimkv.lab.soak.run import SoakReport, soak_server
from slimkv.lab.soak.settings import SoakSettings

__all__ = ["SoakReport", "SoakSettings", "soak_server"]
