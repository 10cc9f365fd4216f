"""Before torch is loaded: one thread per process, since several ranks share the cores of a test machine."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))  # the tools in benchmarks/, which are not installed
