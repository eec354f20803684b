"""Settings of the whole suite."""

import os

# The models here are tiny: a second thread would only wait at barriers, and badly so on a busy machine.
# Set before torch is imported, which reads it once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
