"""Settings for all tests."""

from __future__ import annotations

import os

# Before torch is imported: several threads in each of several processes on few cores mostly wait
# for each other (the unit tests take many times longer).
os.environ.setdefault("OMP_NUM_THREADS", "1")
