"""The compiled step of a CPU: one C++ call per forward, built on the machine that runs it."""
