"""Before torch is loaded: one thread per process, since several ranks share the cores of a test machine."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
