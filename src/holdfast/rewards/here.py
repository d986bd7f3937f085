"""Rewards that a Python caller passes as live functions: called in this process, one after the other.

What a function is given and may return is the same as in a file. What a process of its own would add is not here:
nothing ends a function that hangs, and what it prints, keeps or breaks is its caller's.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from holdfast.config.reward import Reward, RewardPoolConfig
from holdfast.errors import ConfigError
from holdfast.rewards.base import CannotStart, Outcome, Sample, Scored
from holdfast.rewards.combine import combine
from holdfast.rewards.loop import event_loop
from holdfast.rewards.outcome import outcome_of, outcome_of_exception
from holdfast.rewards.serve import as_list, seed_sample
from holdfast.rewards.signatures import Batch, Bound, Concurrent, Each, Many, MissingArgument, bind
