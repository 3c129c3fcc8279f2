"""A against B: paired times, their statistics, comparisons of runs and kernels, and the gate."""
