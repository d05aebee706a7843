"""Set-up that every test shares."""

import os

# Tiny tensors gain nothing from threads, and spinning ones starve whatever else the machine runs. Before torch loads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

# A first example pays for imports and a busy machine is slow: time limits belong to pytest-timeout.
settings.register_profile("headrace", deadline=None)
settings.load_profile("headrace")
