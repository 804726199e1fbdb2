"""Settings of the whole suite."""

from __future__ import annotations

import os

# Before torch is imported anywhere, subprocesses included: the models of the tests are so small
# that a second thread costs more than it brings, and spinning threads starve other processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
