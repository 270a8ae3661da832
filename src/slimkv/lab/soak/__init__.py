"""Stress test of a live server: random load, cancellations, preemption; then checks of its state."""

from slimkv.lab.soak.run import SoakReport, soak_server
from slimkv.lab.soak.settings import SoakSettings

__all__ = ["SoakReport", "SoakSettings", "soak_server"]
