"""Trackers show the numbers of a run elsewhere, each in a process of its own that a run can lose.

A run puts rows into a queue and a thread writes them into the process's pipe, so a tracker that is slow, hangs or dies
costs no step. Rows that it did not record are lost, and counted.
"""
