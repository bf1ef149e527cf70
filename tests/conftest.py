"""For all tests."""

from __future__ import annotations

import os

# Before torch is imported: with several threads to each of several processes on few cores, torch
# waits more than it computes (the unit tests take many times as long).
os.environ.setdefault("OMP_NUM_THREADS", "1")
