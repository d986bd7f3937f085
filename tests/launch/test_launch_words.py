"""The pure parts: how many ranks, who was first, and which lines of a log are the error."""

from __future__ import annotations

import signal

import pytest

from holdfast.config.sections.launch import LaunchConfig
from holdfast.launch.environment import cuda_devices, resolve_ranks, under_torchrun
from holdfast.launch.verdict import Death, first_cause, last_error
from holdfast.parallel.failure.reports import Failure


def test_torchrun_is_known_by_rank_and_world_size():
    assert under_torchrun({"RANK": "0", "WORLD_SIZE": "2"})
    assert not under_torchrun({"RANK": "0"})


@pytest.fixture
def two_gpus(tmp_path):
    """An environment whose nvidia-smi lists two GPUs."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100 (UUID: GPU-a)'\necho 'GPU 1: NVIDIA H100 (UUID: GPU-b)'\n")
    program.chmod(0o755)
    return {"PATH": str(tmp_path)}


@pytest.mark.parametrize(
    ("visible", "count"),
    [(None, 2), ("", 0), ("0,1", 2), ("1", 1), ("-1", 0), ("0,-1,1", 1), ("0,5", 1), ("GPU-b", 1), ("MIG-1,MIG-2", 2)],
)
def test_visible_devices_are_counted_as_cuda_would_show_them(two_gpus, visible, count):
    environ = two_gpus if visible is None else {**two_gpus, "CUDA_VISIBLE_DEVICES": visible}

    assert cuda_devices(environ) == count


def test_auto_is_one_rank_per_gpu_and_one_without(two_gpus):
    assert resolve_ranks(LaunchConfig(), two_gpus) == 2
    assert resolve_ranks(LaunchConfig(device="cpu"), two_gpus) == 1
    assert resolve_ranks(LaunchConfig(), {**two_gpus, "CUDA_VISIBLE_DEVICES": ""}) == 1
    assert resolve_ranks(LaunchConfig(ranks=4, device="cpu"), two_gpus) == 4


def death(rank, exit_code, time, kind=None, ended_by_launcher=False):
    report = None if kind is None else Failure(rank, kind, "update", "ValueError", "boom", 3, time)
    return Death(rank, exit_code, time, "update", report, "", ended_by_launcher)


@pytest.mark.parametrize(
    "deaths",
    [
        [death(0, 3, 1.0, "peer"), death(1, 1, 2.0, "error")],
        [death(0, 1, 2.0, "error"), death(1, 1, 1.0, "error")],
        [death(0, 3, 1.0, "peer"), death(1, -signal.SIGKILL, 1.2, "silent")],
        [death(0, -signal.SIGABRT, 1.0, "silent"), death(1, 1, 2.0)],
        [death(0, -signal.SIGKILL, 3.0, ended_by_launcher=True), death(1, -signal.SIGSEGV, 3.1)],
        [death(0, 3, 3.0, "peer"), death(1, -signal.SIGKILL, 9.0, "error", ended_by_launcher=True)],
        [death(0, 4, 1.0), death(1, -signal.SIGKILL, 2.0)],
    ],
    ids=[
        "own before lost peer",
        "earlier first",
        "kill before lost peer",
        "abort",
        "ended by us",
        "hung after report",
        "no result",
    ],
)
def test_the_first_cause_is_rank_1(deaths):
    assert first_cause(deaths).rank == 1


def test_a_traceback_of_torch_is_read_without_its_prefixes_and_noise():
    log = """loading
[rank1]: Traceback (most recent call last):
[rank1]:   File "a.py", line 1, in outer
[rank1]:     inner()
[rank1]:   File "b.py", line 2, in inner
[rank1]:     raise ValueError("boom")
[rank1]: ValueError: boom
[rank1]:   and more
[rank1]:[W1121 12:04:52.104761657 ProcessGroup.cpp:1] Warning: not destroyed
"""

    assert last_error(log).splitlines() == [
        '  File "b.py", line 2, in inner',
        '    raise ValueError("boom")',
        "ValueError: boom",
        "  and more",
    ]


def test_the_last_of_chained_tracebacks_counts():
    log = (
        "Traceback (most recent call last):\nKeyError: 1\n\nDuring handling of the above exception, another exception "
        "occurred:\n\nTraceback (most recent call last):\nDataError: no row\n"
    )

    assert last_error(log) == "DataError: no row"


def test_a_crash_in_native_code_is_read_from_the_fault_handler():
    log = "step 1\nFatal Python error: Segmentation fault\n\nCurrent thread 0x1 (most recent call first):\n"

    assert last_error(log) == "Fatal Python error: Segmentation fault"


def test_without_an_exception_the_last_lines_are_the_error():
    assert last_error("one\n\n10%\r20%\rtwo\n\x1b[1mthree\x1b[0m\n\n") == "two\nthree"
