"""`holdfast replay`: a recorded step, made again in this process."""

from __future__ import annotations

from pathlib import Path

from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.config.verbs.roots import load_run
from holdfast.errors import ConfigError


def replay(directory: Path, step: int) -> int:
    """Print what was compared; return 0 if the step is reproduced, else 1.

    Raises:
        ConfigError: The directory holds no policy's run, or not what a replay needs.
    """
    file = directory / "config.resolved.yaml"
    if not file.exists():
        raise ConfigError(f"{directory} is no run: it has no {file.name}.")
    alone = ["launch.ranks=1", "launch.device=cpu", "parallel.replicate=1", "parallel.shard=auto", "rollout.show=0"]
    config = load_run(file, [*alone, "rollout.record=false"]).config
    if not isinstance(config, GRPOConfig):
        raise ConfigError(f"{directory} is a run of `holdfast {config.verb}`; only rollouts are recorded.")
    from holdfast.parallel.mesh import joined_world
    from holdfast.recipes.replay import replay as replay_step

    with joined_world(config.launch) as world:
        lines, same = replay_step(config, directory, step, world)
    for line in lines:
        print(line)
    print(f"step {step} is reproduced" if same else f"step {step} cannot be reproduced")
    return 0 if same else 1
