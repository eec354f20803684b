"""Settings of the whole suite."""

import os
import signal

# The models here are tiny: a second thread would only wait at barriers, and badly so on a busy machine.
# Set before torch is imported, which reads it once.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Started in the background of a shell, the suite would inherit that Ctrl-C is ignored, and so would what it starts;
# tests of interrupts would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)
