"""Benchmarks, mostly as ratios of times within one run.

One thread is used, because waiting threads spin, which would count as CPU time.
"""

import os

for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")
