"""Stress test of a live server: random load, cancellations, preemption; then checks of its state."""
