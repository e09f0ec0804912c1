"""Measurements, as ratios within one run. One thread: others would spin, and their waiting would count as work."""

import os

for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")
