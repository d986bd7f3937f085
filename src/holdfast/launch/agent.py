"""Run torchrun without its traceback of failed ranks, and with the exit code of the rank that ended first.

The command line is torchrun's. With `--max-restarts`, torchrun restarts every rank whose exit code is not 0, although
an orderly stop and a mistake of the user have such codes; those ranks write their code to a file and exit with 0
(`launch/first_rank.py`).
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

from holdfast.errors import RunStopped, UserError
from holdfast.launch.first_rank import EXIT_FILE_VARIABLE

_ORDERLY = range(5)


def main() -> int:
    """Run torchrun's command line; return 0, the code of the rank that ended first, or 3 after a signal."""
    # Of a store whose host is gone torch prints a page of C++ frames for every look; read when torch is imported.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Ranks meet at a port of their own in every round: torch 2.13 does not tell its shared one to a machine that
    # comes back.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    # Imported here and not at the top: the variables above are read when torch is imported.
    from torch.distributed.run import parse_args

    logging.disable(logging.CRITICAL)  # each of torchrun's modules sets a level of its own
    arguments = parse_args(sys.argv[1:])  # type: ignore[no-untyped-call]  # torch's own lack annotations
    with tempfile.TemporaryDirectory(prefix="holdfast-agent-") as folder:
        exit_file = Path(folder) / "exit"
        if arguments.max_restarts:
            os.environ[EXIT_FILE_VARIABLE] = str(exit_file)
        return _run(arguments, exit_file)


def _run(arguments: Any, exit_file: Path) -> int:
    from torch.distributed import DistNetworkError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.run import run

    from holdfast.parallel.rendezvous import network_mistake

    try:
        run(arguments)  # type: ignore[no-untyped-call]
    except SignalException:
        return RunStopped.exit_code
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            print(f"Rank {rank} on {_host()} was ended by {name}.", file=sys.stderr, flush=True)
        return failure.exitcode if failure.exitcode in _ORDERLY else RunStopped.exit_code
    except (DistNetworkError, RendezvousError) as error:
        cause = error.__cause__ or error
        mistake = network_mistake(cause, arguments.rdzv_endpoint or f"{arguments.master_addr}:{arguments.master_port}")
        if mistake is not None:
            print(mistake, file=sys.stderr, flush=True)
            return UserError.exit_code
        first_line = str(cause).strip().partition("\n")[0]
        print(f"{_host()} lost the meeting place of the machines: {first_line}", file=sys.stderr, flush=True)
        return RunStopped.exit_code
    return int(exit_file.read_text()) if exit_file.exists() else 0


def _host() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


if __name__ == "__main__":
    sys.exit(main())
