"""Updates of SFT and LoRA on one GPU: ours, TRL's, and TRL's with Liger's kernels.

    python benchmarks/update.py sft_05b [--rounds 2] [--tiny]

Every arm is a run as its user starts it: `holdfast.sft` and `SFTTrainer.train` with their own defaults, the same model,
the same rows in the same order (their mean loss must agree within 1 %), float32 weights under bfloat16 compute, the
same optimizer, no recomputation, no checkpoint. Rows have equal lengths and fill one micro-batch, so no arm pads. With
LoRA the frozen weights are bfloat16. One arm is in memory at a time. Time is taken over all updates behind the warm-up
together, so that no clock makes the device wait between them. A peak is the most that the process has allocated since
the model was drawn, checks and compiling included. `--tiny` trains a tiny model on the CPU, which says that the script
runs and nothing else.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from measure import FAILED, Meter, Round, alternate, heading, random_model
from sft_vs_trl import OPTIMIZER, TEXT_ENDS, train, trl_arguments
from verdicts import Verdicts, skip

UPDATES, WARM_UP = 12, 4
"""Updates, and those at the start that are not timed: they compile, and fill the allocator's pool."""
RANK, ALPHA = 16, 32


@dataclass(frozen=True)
class Case:
    """What is trained, and what is asked of ours over TRL with Liger's kernels."""

    model: str
    rows: int
    length: int = 1024
    lora: bool = False
    speed: float | None = None
    """Ours over theirs in tokens per second, at least."""
    peak: float | None = None
    """Ours over theirs in peak memory, at most."""

    def texts(self) -> list[str]:
        """Return texts of one length: a token per character, and one that ends them."""
        generator = np.random.default_rng(1)
        letters = np.array(list("abcdefghijklmnopqrstuvwxyz0123456789"))
        return ["".join(generator.choice(letters, self.length - 1)) for _ in range(self.rows * UPDATES)]


CASES = {
    "sft_05b": Case("0.5b", 16, speed=1.3, peak=1.0),
    "sft_15b": Case("1.5b", 8),
    "sft_7b": Case("7b of six layers", 8, speed=1.1, peak=1.15),
    "lora_7b": Case("7b of six layers", 8, lora=True, speed=1.1),
}
DATA_SHARE = 0.02
"""Most of a step that may be waiting for its batch."""


def result(case: Case, meter: Meter, seconds: float, loss: float, data_share: float | None = None) -> None:
    """Print an arm's line, from the seconds of the updates behind the warm-up."""
    timed = UPDATES - WARM_UP
    said = {
        "tokens_per_second": case.rows * case.length * timed / seconds,
        "ms": 1000 * seconds / timed,
        "peak_gib": meter.peak_mib() / 1024,
        "loss": loss,
    }
    print(json.dumps(said if data_share is None else said | {"data_share": data_share}))


def holdfast(case: Case, device: str) -> None:
    import holdfast as package
    from holdfast.data.tasks.synthetic import character_tokenizer

    directory = tempfile.mkdtemp()
    model: dict[str, Any] = {"path": "live"}
    if case.lora:
        model |= {"lora": {"rank": RANK, "alpha": ALPHA}, "frozen_dtype": "bfloat16"}
    tree = {
        "steps": UPDATES,
        "model": model,
        "data": {
            "batch_size": case.rows,
            "max_length": case.length,
            "tokens_per_micro_batch": case.rows * case.length,
            "shuffle": False,
        },
        "optim": {**OPTIMIZER, "schedule": "constant", "clip_norm": 1.0},
        "launch": {"device": device},
        "run": {"dir": directory, "name": "arm"},
        "metrics": {"progress": "off"},
        "checkpoint": {"rehearsal": False, "at_end": False, "export_at_end": False},
    }
    language_model = random_model(case.model, device).cpu()
    meter = Meter(device)
    meter.begin_peak(whole=True)
    rows = [{"text": text} for text in case.texts()]
    package.sft(tree, rows=rows, model=language_model, tokenizer=character_tokenizer())
    meter.seconds()
    lines = [json.loads(line) for line in Path(directory, "arm", "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "step_time" in line]
    tokens = {step["data/tokens"] for step in steps}
    assert len(steps) == UPDATES and tokens == {case.rows * case.length}, f"{len(steps)} updates of {tokens} tokens"
    timed = steps[WARM_UP:]
    seconds = sum(step["step_time"] for step in timed)
    waited = sum(step.get("timing/data", 0.0) for step in timed)
    result(case, meter, seconds, statistics.mean(step["loss"] for step in steps), waited / seconds)


class Clock:
    """Reads the clock of a trainer of TRL between its updates."""

    def __init__(self, case: Case, meter: Meter, trainer: Any) -> None:
        self._case, self._meter, self._trainer = case, meter, trainer
        self._stamps: list[float] = []

    def tick(self) -> None:
        """Note the time; only the last update is waited for."""
        wait = len(self._stamps) in {WARM_UP, UPDATES}
        if wait:
            self._meter.seconds()
        self._stamps.append(time.perf_counter())

    def report(self) -> None:
        """Print the arm's line."""
        assert len(self._stamps) == UPDATES + 1, f"{len(self._stamps) - 1} updates"
        (ending,) = [entry for entry in self._trainer.state.log_history if "train_loss" in entry]
        result(self._case, self._meter, self._stamps[-1] - self._stamps[WARM_UP], ending["train_loss"])


def trl(case: Case, device: str, *, liger: bool) -> None:
    import torch
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from holdfast.data.tasks.synthetic import character_tokenizer

    class InOrder(SFTTrainer):
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return torch.utils.data.SequentialSampler(dataset or self.train_dataset)

    tokenizer, adapters = character_tokenizer(), None
    language_model = random_model(case.model, device)
    if case.lora:
        from peft import LoraConfig

        adapters = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
        language_model = language_model.to(torch.bfloat16)
    arguments = SFTConfig(
        **trl_arguments(device),
        per_device_train_batch_size=case.rows,
        max_steps=UPDATES,
        max_length=case.length,
        use_liger_kernel=liger,
        logging_steps=UPDATES,  # a line for each step would wait for each
    )
    meter = Meter(device)
    meter.begin_peak(whole=True)
    sequences = [[*tokenizer(text)["input_ids"], TEXT_ENDS] for text in case.texts()]
    trainer = InOrder(
        model=language_model,
        args=arguments,
        train_dataset=Dataset.from_dict({"input_ids": sequences}),
        processing_class=tokenizer,
        peft_config=adapters,
    )
    train(trainer, Clock(case, meter, trainer))


ARMS = {"holdfast": (), "trl": ("trl",), "trl_liger": ("trl", "liger_kernel", "triton")}
"""Arm to the packages that it needs beyond ours."""


def compare(case: Case, arms: list[str], rounds: list[Round], *, judged: bool) -> bool:
    """Print what the arms took and how they compare; return whether something failed or missed its target."""
    verdicts = Verdicts(rounds, judged=judged)
    for arm in arms:
        verdicts.tell(f"tokens per second, {arm}", arm, "tokens_per_second")
        verdicts.tell(f"peak GiB, {arm}", arm, "peak_gib")
    verdicts.number_at_most(DATA_SHARE, "share of a step that waits for its batch", "holdfast", "data_share")
    for arm in arms[1:]:
        asked = arm == "trl_liger"
        title = f"tokens per second, Holdfast over {arm}"
        verdicts.at_least(case.speed if asked else None, title, "holdfast", arm, "tokens_per_second")
        title = f"peak memory, Holdfast over {arm}"
        verdicts.at_most(case.peak if asked else None, title, "holdfast", arm, "peak_gib")
    return verdicts.missed or not alike(rounds)


def alike(rounds: list[Round]) -> bool:
    """Return whether the mean losses of all arms agree within 1 %, so that they trained on the same; print if not."""
    losses = [said["loss"] for turn in rounds for said in turn.values() if FAILED not in said]
    if losses and max(losses) > 1.01 * min(losses):
        print(f"the arms did not do the same work: mean losses {losses}")
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=list(CASES))
    parser.add_argument("--arm", choices=list(ARMS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    case, device = CASES[options.case], "cpu" if options.tiny else "cuda"
    if options.tiny:
        case = replace(case, model="tiny", rows=2, length=64)
    if options.arm == "holdfast":
        holdfast(case, device)
    elif options.arm:
        trl(case, device, liger=options.arm == "trl_liger")
    else:
        sys.exit(run(options, case, device))


def run(options: argparse.Namespace, case: Case, device: str) -> bool:
    """Run the arms whose packages are here; return whether something failed or missed its target."""
    if case.lora and find_spec("peft") is None:
        skip(options.case, "peft is not installed")
        return False
    arms = []
    for arm, packages in ARMS.items():
        if missing := [name for name in packages if find_spec(name) is None]:
            skip(f"arm {arm}", f"{' and '.join(missing)} not installed")
        else:
            arms.append(arm)
    print(heading(*("trl",) * ("trl" in arms), "transformers", device=device))
    print(f"{case.model}, updates of {case.rows} x {case.length:,} tokens, {UPDATES - WARM_UP} of {UPDATES} timed")
    flags = [options.case, *(["--tiny"] if options.tiny else [])]
    rounds = alternate(__file__, arms, options.rounds, *flags, alone=True)
    return compare(case, arms, rounds, judged=not options.tiny)


if __name__ == "__main__":
    main()
