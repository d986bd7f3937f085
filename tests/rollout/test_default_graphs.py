"""Which engines record their steps where no key asks for it; tests/fake_devices has the devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.parallel.mesh import World
from tests.distributed.grpo_cases import prompts_of, settings
from tests.tiny import tiny_directory


def recorder_of(world: World, tree: dict[str, Any], rows: Any) -> tuple[str, str]:
    """Return the key of a run that does not set it, and what its engine records steps with."""
    from tests.training.walk_cases import built

    run = built(world, tree, rows)
    engine: Any = run.evaluation.sampler.engine
    return run.config.rollout.graphs, type(engine._recorder).__name__


def test_a_cpu_records_no_steps_by_default(pools: Any, tmp_path: Path) -> None:
    tree = settings(str(tiny_directory(tmp_path, "llama")))

    assert pools(1).run(recorder_of, tree, prompts_of(8)) == [("auto", "NoneType")]
