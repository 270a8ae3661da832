"""Timed cells: store and attend on this machine, beside the baselines that can run here.

A cell is a shape and a format; every row of a report carries the time of slimkv and of each baseline in the same run.
"""
