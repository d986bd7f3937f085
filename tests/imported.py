"""What nearly every process of a test imports, for one process to import from which the others are forked.

transformers imports what it names only when it is asked for: a second and a half in each process that builds a model.
"""

from __future__ import annotations

import gc

import datasets
import peft
import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.run
import transformers.modeling_utils
import typer
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.llama import modeling_llama

import holdfast.api
import holdfast.recipes.evaluation
import tests.short_times

assert all((datasets, peft, torch, transformers, typer, modeling_llama, holdfast, tests.short_times))

get_checkpoint_conversion_mapping("llama")  # compiles a thousand patterns, once in a process

gc.collect()
gc.freeze()  # a million objects that no collection in what is forked need visit: a sixth of the time of tests
