"""Before a policy's first step: the way of that step, once, on two tiny groups of which nothing is kept.

A model may pass every comparison of its forward pass and still fail where it is first sampled from, or where several
completions share their prompt in a pack. That would show in step 1, behind a rollout that may take an hour. Here every
rank samples a few tokens by the run's own engine, lays them out as the run will, lets reference and critic score them,
and makes an update. Rewards are made up: the functions of a user want rows of theirs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from time import perf_counter
from typing import Any

import torch

from holdfast.data.vision import ImageSide
from holdfast.errors import HoldfastError, ModelError
from holdfast.models.selfcheck import plain_tokens
from holdfast.optim.muon import Muon
from holdfast.parallel.materialise import local_part, sharded_parameters
from holdfast.rewards.base import Scored
from holdfast.training.critic import train_critic, with_values
from holdfast.training.experience import pack_rollout, score_rollout, with_advantages
from holdfast.training.facts import share_facts
from holdfast.training.policy import PolicyRun, rest
from holdfast.training.rollouts import Rollout, sample_groups
from holdfast.training.run import Run
from holdfast.training.step import train_step
from holdfast.types import Group, MiniBatch, Prompt
