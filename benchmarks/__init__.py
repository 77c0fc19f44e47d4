"""Benchmarks: our figure, the raw SQLite commit rate just before and after it in the same run, and their ratio.

Absolute numbers depend on the disk and on who else uses the machine; ratios within one run do not much. Nothing here is
asserted: a test that times is a test that lies.
"""
