"""Trackers mirror metrics.jsonl elsewhere, each in a process of its own that a run can lose.

A run only starts and ends these processes. Each of them reads the files that the run writes anyway, from where it
last stopped. So a tracker that is slow, hangs or dies costs the run nothing, and loses nothing: the next start of the
run goes on there.
"""
