"""torchrun, without its traceback where ranks have said how they ended, and with their exit code as its own."""

from __future__ import annotations

import logging
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from holdfast.errors import RunStopped


def main() -> int:
    """Run torchrun's command line; return 0, the code of the rank that ended first, or 3 after a signal."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.run").setLevel(logging.CRITICAL)
    try:
        run(parse_args(sys.argv[1:]))  # type: ignore[no-untyped-call]  # torch's own lack annotations
    except SignalException:
        return RunStopped.exit_code
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            print(f"Rank {rank} was ended by signal {-failure.exitcode}.", file=sys.stderr, flush=True)
        return failure.exitcode if failure.exitcode > 0 else RunStopped.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
