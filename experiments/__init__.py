"""Sweeps over the kernels: suites, a runner that survives crashes, and a store of what was measured.

`schema` and `store` are what the dashboard reads through; neither imports a kernel, a compiler or CuPy.
"""
