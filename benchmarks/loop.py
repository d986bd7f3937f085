"""What the loop around a step costs: CPU between two steps (control, metrics, marks) over CPU inside them.

    python benchmarks/loop.py

One process, the model, rows and updates of sft_vs_trl.py, in one run of `fit`; no evaluation and no save is due.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import sft_vs_trl
from measure import heading

from models import random_model

WARM_UP, LIMIT = 2, 0.014


def main() -> None:
    from holdfast.config.load import from_mapping
    from holdfast.config.verbs.training import SFTConfig
    from holdfast.data.tasks.synthetic import character_tokenizer
    from holdfast.parallel.mesh import joined_world
    from holdfast.recipes.sft import sft_step
    from holdfast.training.evaluate import evaluate
    from holdfast.training.fit import fit
    from holdfast.training.run import Training
    from holdfast.training.setup.begin import Live, build_run

    tree = {
        "steps": sft_vs_trl.STEPS,
        "run": {"dir": tempfile.mkdtemp()},
        "metrics": {"progress": "off"},
        "model": {"path": "live", "tokenizer": "builtin:characters"},
        "data": {
            "path": "rows",
            "batch_size": sft_vs_trl.ROWS,
            "max_length": sft_vs_trl.LONGEST,
            "tokens_per_micro_batch": 16 * sft_vs_trl.LONGEST,
        },
        "optim": {"lr": 1e-5, "schedule": "constant"},
        "checkpoint": {"rehearsal": False, "at_end": False, "export_at_end": False},
    }
    config = from_mapping(tree, SFTConfig)
    starts: list[float] = []
    ends: list[float] = []

    def step(training: Training) -> dict[str, float] | None:
        starts.append(time.process_time())
        metrics = sft_step(training)
        ends.append(time.process_time())
        return metrics

    with joined_world(config.launch) as world:
        rows = [{"text": text} for text in sft_vs_trl.texts()]
        live = Live(rows=rows, model=random_model("small"), tokenizer=character_tokenizer())
        training = build_run(config, Path.cwd(), world, live)
        fit(training, partial(step, training), partial(evaluate, training.evaluation))
    inside = statistics.median(end - start for start, end in list(zip(starts, ends, strict=True))[WARM_UP:])
    between = statistics.median(start - end for end, start in list(zip(ends, starts[1:], strict=False))[WARM_UP:])
    print(heading("transformers"))
    share = between / inside
    verdict = "ok  " if share <= LIMIT else "MISS"
    print(f"{verdict}  loop over step: {share:.4f} (target <= {LIMIT}; inside {inside:.3f} s, between {between:.5f} s)")


if __name__ == "__main__":
    main()
