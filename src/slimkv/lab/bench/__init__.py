"""Timed cells: store and attend on this machine, next to the baselines that can run here.

A cell is a shape and a format. Every row of a report has the times of slimkv and of each baseline from the same run.
"""
