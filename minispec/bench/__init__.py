"""Measurements. Each checks what it times, compares within one run, and ends in one JSON line."""
