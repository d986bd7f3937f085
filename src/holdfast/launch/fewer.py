"""The numbers of ranks with which a run goes on when some are lost, by `launch.min_ranks`."""

from __future__ import annotations

from holdfast.config.sections.parallel import ParallelConfig
from holdfast.config.verbs.training import TrainingConfig
from holdfast.errors import ConfigError


def fewer_ranks(config: TrainingConfig, ranks: int) -> list[int]:
    """Return the numbers below `ranks` with which a run may go on, smallest first; none without `launch.min_ranks`.

    Raises:
        ConfigError: `min_ranks` is more than there are, or so many cannot share the model.
    """
    fewest, parallel = config.launch.min_ranks, config.parallel
    if fewest is None:
        return []
    if fewest > ranks:
        raise ConfigError(f"launch.min_ranks={fewest}, but the run has {ranks} ranks. Lower it, or start more ranks.")
    numbers = [number for number in range(fewest, ranks + 1) if _can_share(parallel, number)]
    if fewest not in numbers:
        possible = f" Set it to {' or '.join(map(str, numbers))}, or change these." if numbers else " Set shard: auto."
        raise ConfigError(
            f"launch.min_ranks={fewest}, but so many ranks cannot share the model by parallel.replicate="
            f"{parallel.replicate}, parallel.shard={parallel.shard} and parallel.context={parallel.context}.{possible}"
        )
    return [number for number in numbers if number < ranks]


def _can_share(parallel: ParallelConfig, ranks: int) -> bool:
    shares, rest = divmod(ranks, parallel.replicate * parallel.context)
    return rest == 0 and parallel.shard in {"auto", shares}
