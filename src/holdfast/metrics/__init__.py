"""Metrics of a run: sinks, progress display, throughput, and alarms."""
