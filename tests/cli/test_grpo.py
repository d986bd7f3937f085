"""`holdfast grpo` as a user meets it: what it writes, what it refuses, and how it ends when it is asked to."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from holdfast.checkpoint.inspect.compare import differences
from holdfast.checkpoint.keep import find
from holdfast.metrics.sink import read_metrics
from tests.cli.commands import LiveRun
from tests.cli.fixtures import TINY, write_rows, write_run
from tests.cli.screens import ended, numbers, resumed_at
from tests.cli.warm import Done, WarmPython
from tests.crash.runs import log_of_run
from tests.messages import Said, lacks

REWARDS = """
import os, sys, time
from pathlib import Path

def even(completion_ids):
    return sum(token % 2 == 0 for token in completion_ids) / len(completion_ids)

def constant(completion):
    return 1.0

def broken(completion):
    raise ValueError("no such answer")

def fatal(completion):
    if os.environ["RANK"] == "1":
        os.kill(os.getppid(), 9)
        time.sleep(60)
    return 1.0

def hangs_on_one_rank(completion):
    if os.environ["RANK"] == "0":
        time.sleep(600)
    return 1.0

def told(completions, trainer_state, **kwargs):
    return [trainer_state.global_step / trainer_state.max_steps] * len(completions)

def shared(completions):
    return [1.0]

def shared_later(completions, trainer_state):
    return [1.0] if trainer_state.global_step else [1.0] * len(completions)

def moody(answer):
    if int(answer) % 2:
        raise ValueError("odd")
    return 1.0

def words(completion):
    return "good"

def hangs(completion, sample_id):
    print("noise " * 1000)
    if sample_id % 2:
        time.sleep(600)
    return 1.0

def slow(completion):
    Path("asked").touch()
    time.sleep(3)
    return 1.0
"""


@pytest.fixture
def policy(tmp_path: Path, tree: dict[str, Any]) -> dict[str, Any]:
    """Return a policy's run that works on two ranks, with its prompts and rewards in the same directory."""
    (tmp_path / "rewards.py").write_text(REWARDS)
    write_rows(tmp_path / "rows.jsonl", [{"prompt": f"add {n}=", "answer": str(n)} for n in range(12)])
    return tree | {
        "steps": 3,
        "reward": {"path": "rewards.py:even"},
        "rollout": {"group_size": 4, "max_new_tokens": 8, "show_every": 2},
        "optim": {"lr": 0.01},
    }


def warnings_of(out: str, key: str) -> list[str]:
    """Return the warnings that name a key."""
    return [line for line in out.splitlines() if line.startswith("warning: ") and key in line]


def grpo(warm: WarmPython, place: Path, tree: dict[str, Any], *overrides: str) -> Done:
    write_run(place / "run.yaml", tree)
    return warm.run("-m", "holdfast.cli.main", "grpo", "run.yaml", *overrides, cwd=place)


@pytest.mark.slow
def test_a_run_leaves_metrics_samples_and_a_model(warm: WarmPython, tmp_path: Path, policy: dict[str, Any]) -> None:
    evaluation = {"sets": {"held_out": {"path": "rows.jsonl"}}, "per_prompt": 4, "sampling": {"temperature": 1.0}}

    done = grpo(warm, tmp_path, policy | {"evaluation": evaluation})

    assert done.code == 0, done.err
    run = tmp_path / "runs" / "run"
    lines = read_metrics(run / "metrics.jsonl")
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    expected = {
        "reward", "reward_std", "rewards/even/mean", "frac_reward_zero_std", "completions/mean_length",
        "completions/clipped_ratio", "clip_ratio/region_mean", "timing/rollout", "timing/reward", "num_tokens",
        "sampling/sampling_logp_difference/mean",
    }  # fmt: skip
    assert expected <= steps[0].keys()
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    of_first = [sample for sample in samples if sample["step"] == 1]
    assert len(of_first) == 16
    assert np.mean([sample["reward"] for sample in of_first]) == pytest.approx(steps[0]["reward"], abs=1e-9)
    assert all(sample["trained"] for sample in of_first)
    assert sum(sample["advantage"] for sample in of_first) == pytest.approx(0, abs=1e-5)
    assert any(abs(sample["advantage"]) > 0.1 for sample in of_first)
    assert re.search(r"completions \w+ step 1:", done.out)
    assert [word in done.out for word in ("best", "worst")] == [True] * 2
    first, last = (line for line in lines if "eval/held_out/pass@4" in line)
    assert first["step"] == 0
    assert 0 <= first["eval/held_out/pass@1"] <= first["eval/held_out/pass@2"] <= first["eval/held_out/pass@4"] <= 1
    assert last["step"] == 3
    completions = (run / "completions" / "step-00000003.held_out.jsonl").read_text().splitlines()
    assert len(completions) == 48
    assert AutoModelForCausalLM.from_pretrained(run / "exports" / "final").config.hidden_size == TINY["hidden_size"]


WATCHED = """
import json, os
import torch

WATCHED = open(f"watched-{os.environ['RANK']}.jsonl", "a")  # of both starts; rank 0's has marks of the steps

def note(module, inputs):
    if isinstance(module, torch.nn.Embedding) and not torch.is_grad_enabled():
        print(json.dumps(inputs[0].tolist()), file=WATCHED, flush=True)

torch.nn.modules.module.register_module_forward_pre_hook(note)

def mark(event):
    print(json.dumps(f"step {event.step}"), file=WATCHED, flush=True)
"""


@pytest.mark.slow
def test_a_resume_in_bfloat16_decodes_the_same_completions_as_a_run_without_a_stop(
    warm: WarmPython, tmp_path: Path, policy: dict[str, Any]
) -> None:
    """A row's rounding depends on the rows beside it, so the same completions must be decoded together."""
    tree = policy | {
        "rollout": {"group_size": 4, "max_new_tokens": 24, "rows": 6, "record": True, "show": 0},
        "optim": {"lr": 0.05, "schedule": "constant"},
        "parallel": {"compute_dtype": "bfloat16"},
        "checkpoint": {"every_steps": 1, "keep": {"every": 1}},
        "observers": ["watch.py:mark"],
    }
    (tmp_path / "watch.py").write_text(WATCHED)
    straight, resumed = tmp_path / "runs" / "straight", tmp_path / "runs" / "resumed"

    done = [
        grpo(warm, tmp_path, tree, f"run.name={name}", f"steps={steps}")
        for name, steps in (("straight", 4), ("resumed", 2), ("resumed", 4))
    ]

    assert [each.code for each in done] == [0, 0, 0], done[-1].err
    assert "compute bfloat16" in done[-1].out
    assert resumed_at(done[-1].out) == 2
    for step in range(1, 5):
        kept = [
            gzip.decompress((run / f"rollouts/step-{step:08d}.jsonl.gz").read_bytes()) for run in (straight, resumed)
        ]
        groups = [[json.loads(line) for line in each.splitlines()[1:]] for each in kept]
        assert len(groups[0]) == 4
        assert groups[0] == groups[1], step
    watched = [json.loads(line) for line in (tmp_path / "watched-0.jsonl").read_text().splitlines()]
    begun, end, _, last = [place for place, line in enumerate(watched) if line in ("step 2", "step 4")]
    decoded = watched[begun + 1 : end]
    assert len({len(tokens) for tokens in decoded if isinstance(tokens, list)}) > 2, "rows come and go in a rollout"
    assert decoded == watched[last - len(decoded) : last]
    assert log_of_run(straight) == log_of_run(resumed)
    assert list(differences(find.one(str(straight)), find.one(str(resumed)))) == []


CRITIC: dict[str, Any] = {
    "advantage": "gae",
    "critic": {"warmup_steps": 1, "optim": {"lr": 0.01}},
    "kl": {"coefficient": 0.05, "estimator": "k1", "where": "reward"},
    "updates": {"passes": 2},
}
FOLLOWS: dict[str, Any] = {
    "kl": {"coefficient": 0.05},
    "reference": {"kind": "offloaded", "sync": {"every_steps": 2}},
    "residency": {"parameters": "host", "optimizer": "host"},
}


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, CRITIC, FOLLOWS], ids=["groups", "critic", "a reference that follows"])
def test_the_proof_holds_for_rollouts(
    warm: WarmPython, tmp_path: Path, policy: dict[str, Any], more: dict[str, Any]
) -> None:
    write_run(tmp_path / "run.yaml", policy | {"data": policy["data"] | {"batch_size": 2}} | more)

    done = warm.run(
        "-m", "holdfast.cli.main", "prove", "run.yaml", "--steps", "5", "--kill-at", "4", "--seed", "3", cwd=tmp_path
    )

    assert done.code == 0, done.out + done.err
    assert re.search(r"SIGKILL .*\b[01]\b.* phase \w+ .*\b4$", done.out, re.MULTILINE)
    assert done.out.splitlines()[-1] == "identical"


@pytest.mark.slow
def test_a_recorded_step_is_reproduced_by_one_process_and_a_changed_one_is_not(
    warm: WarmPython, tmp_path: Path, policy: dict[str, Any], said: Said
) -> None:
    recorded = policy | {"rollout": policy["rollout"] | {"record": True}, "checkpoint": {"every_steps": 1}}
    recorded["residency"] = {"parameters": "host", "optimizer": "host"}  # of two ranks; one has no copy to sample from
    assert grpo(warm, tmp_path, recorded).code == 0

    def replay(step: int) -> Done:
        return warm.run("-m", "holdfast.cli.main", "replay", "runs/run", "--step", str(step), cwd=tmp_path)

    for step in (1, 3):
        done = replay(step)
        assert done.code == 0, done.out + done.err
        assert f"step {step} " in done.out.splitlines()[-1]
    assert "checkpoint.every_steps" not in replay(1).err
    missing = replay(7)
    assert missing.code == 2
    assert numbers(missing.err) == [1, 3]  # the first and last of what is kept
    said(missing.err.strip())

    _flip_a_reward(tmp_path / "runs" / "run" / "rollouts" / "step-00000003.jsonl.gz")
    done = replay(3)
    assert done.code == 1
    assert "step 3 " in done.out


def test_a_step_is_made_again_in_what_it_was_computed_in(
    warm: WarmPython, tmp_path: Path, policy: dict[str, Any], said: Said
) -> None:
    """As on a GPU, where `auto` is bfloat16, and then made again on a CPU, where it is float32."""
    recorded = policy | {"steps": 2, "rollout": policy["rollout"] | {"record": True}, "checkpoint": {"every_steps": 2}}
    done = grpo(warm, tmp_path, recorded, "launch.ranks=1", "parallel.compute_dtype=bfloat16")
    assert done.code == 0, done.err
    (warning,) = warnings_of(done.out, "rollout.record")
    said(warning)
    resolved = tmp_path / "runs" / "run" / "config.resolved.yaml"
    assert "compute_dtype: bfloat16" in resolved.read_text()
    resolved.write_text(resolved.read_text().replace("compute_dtype: bfloat16", "compute_dtype: auto"))

    again = warm.run("-m", "holdfast.cli.main", "replay", "runs/run", "--step", "1", cwd=tmp_path)

    assert again.code == 0, again.out + again.err
    numbers = re.findall(r"^(?:loss|grad_norm): recorded (\S+), replayed (\S+)$", again.out, re.MULTILINE)
    assert len(numbers) == 2
    for then, now in numbers:
        assert then == now


def _flip_a_reward(path: Path) -> None:
    head, first, *others = gzip.decompress(path.read_bytes()).decode().splitlines()
    group = json.loads(first)
    group["facts"]["completions"][0]["reward"] += 1.0
    path.write_bytes(gzip.compress("\n".join([head, json.dumps(group), *others, ""]).encode()))


@pytest.mark.slow
def test_sigterm_in_a_long_rollout_leaves_it_between_tokens_and_the_same_command_makes_it_again(
    warm: WarmPython, tmp_path: Path, policy: dict[str, Any]
) -> None:
    long = policy | {
        "steps": 2,
        "rollout": {"group_size": 2, "max_new_tokens": 2000, "temperature": 0.01, "show": 0},
        "data": policy["data"] | {"max_length": 2100, "tokens_per_micro_batch": 4200, "batch_size": 2},
        "evaluation": {"at_start": False},
        "model": policy["model"] | {"config": policy["model"]["config"] | {"max_position_embeddings": 4096}},
    }
    write_run(tmp_path / "run.yaml", long)
    run = LiveRun(tmp_path, verb="grpo", warm=warm)
    try:
        run.wait_for_step(1)
        run.wait_for(lambda: "step 1" in (tmp_path / "out.txt").read_text())
        run.terminate()
        done, seconds = run.end()
    finally:
        run.close()

    assert done.code == 3, done.err
    assert "SIGTERM" in ended(done.out).why
    assert ended(done.out).step == 1
    assert seconds < 15
    assert (run.directory / "checkpoints" / "step-00000001").is_dir()
    assert [line["step"] for line in run.lines() if "loss" in line] == [1]
    again = grpo(warm, tmp_path, long)
    assert again.code == 0, again.err
    assert resumed_at(again.out) == 1
    straight = grpo(warm, tmp_path, long | {"run": {"name": "straight"}})
    assert straight.code == 0, straight.err
    ours, theirs = tmp_path / "runs" / "run", tmp_path / "runs" / "straight"
    assert [step for step, *_ in log_of_run(ours)] == [1, 2]
    assert log_of_run(ours) == log_of_run(theirs)
    assert list(differences(find.one(str(ours)), find.one(str(theirs)))) == []


@pytest.mark.slow
def test_sigterm_while_rewards_are_made_ends_in_time(warm: WarmPython, tmp_path: Path, policy: dict[str, Any]) -> None:
    slow = policy | {"reward": {"path": "rewards.py:slow"}, "rewards": {"batch_size": 1, "workers": 4}}
    write_run(tmp_path / "run.yaml", slow)
    run = LiveRun(tmp_path, verb="grpo", warm=warm)
    try:
        run.wait_for((tmp_path / "asked").exists)
        run.terminate()
        done, seconds = run.end(60)
    finally:
        run.close()

    assert done.code == 3, done.err
    assert seconds < 40
    assert run.processes() == {}
    saved = [path.name for path in (tmp_path / "runs" / "run" / "checkpoints").glob("step-*")]
    assert saved == ["step-00000001"], "the step whose rewards were made is the last, and is kept"


def nothing_imports(folder: Path, tree: dict[str, Any]) -> None:
    (folder / "rewards.py").write_text("import a_module_that_is_not_there\ndef even(completion): return 1.0\n")


def no_such_function(folder: Path, tree: dict[str, Any]) -> None:
    tree["reward"] = {"path": "rewards.py:evn"}


def a_group_of_one(folder: Path, tree: dict[str, Any]) -> None:
    tree["rollout"]["group_size"] = 1


def a_batch_that_cannot_be_dealt(folder: Path, tree: dict[str, Any]) -> None:
    tree["updates"] = {"mini_batches": 3}


def no_room_for_a_prompt(folder: Path, tree: dict[str, Any]) -> None:
    tree["rollout"]["max_new_tokens"] = 32


def a_prompt_over_budget(folder: Path, tree: dict[str, Any]) -> None:
    write_rows(folder / "rows.jsonl", [{"prompt": "a" * 30, "answer": "1"}] * 12)
    tree["data"]["overlong"] = "refuse"


def only_prompts_over_budget(folder: Path, tree: dict[str, Any]) -> None:
    write_rows(folder / "rows.jsonl", [{"prompt": "a" * 30, "answer": "1"}] * 12)


def an_empty_evaluation_set(folder: Path, tree: dict[str, Any]) -> None:
    (folder / "empty.jsonl").write_text("")
    tree["evaluation"] = {"sets": {"none": {"path": "empty.jsonl"}}}


def a_reward_of_a_column_that_is_not_there(folder: Path, tree: dict[str, Any]) -> None:
    tree["reward"] = [{"path": "rewards.py:even"}, {"path": "rewards.py:moody"}]
    write_rows(folder / "rows.jsonl", [{"prompt": f"add {n}=", "gold": str(n)} for n in range(12)])


def an_evaluation_set_without_the_answer(folder: Path, tree: dict[str, Any]) -> None:
    tree["reward"] = "exact"
    write_rows(folder / "held.jsonl", [{"prompt": f"add {n}=", "gold": str(n)} for n in range(3)])
    tree["evaluation"] = {"sets": {"held": {"path": "held.jsonl"}}}


def a_biased_sampler(folder: Path, tree: dict[str, Any]) -> None:
    tree["rollout"]["top_p"] = 0.9


def a_tokenizer_without_an_end(folder: Path, tree: dict[str, Any]) -> None:
    from holdfast.data.tasks.synthetic import character_tokenizer

    tokenizer = character_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder / "tokenizer")
    tree["model"]["tokenizer"] = "tokenizer"
    tree["model"]["config"] |= {"eos_token_id": None}


REFUSED: dict[Callable[[Path, dict[str, Any]], None], str] = {
    nothing_imports: "a_module_that_is_not_there",
    no_such_function: "rewards.py evn",
    a_group_of_one: "rollout.group_size: 1 grpo 2",
    a_batch_that_cannot_be_dealt: "data.batch_size=4 3",
    no_room_for_a_prompt: "data.max_length=32",
    a_prompt_over_budget: "row 30",
    only_prompts_over_budget: "overlong_dropped: 12",
    an_empty_evaluation_set: "empty",
    a_reward_of_a_column_that_is_not_there: "reward moody: answer prompt gold",
    an_evaluation_set_without_the_answer: "reward exact: answer held prompt gold",
    a_biased_sampler: "top_p",
    a_tokenizer_without_an_end: "eos",
}
"""What makes a run bad, and the words that its message has to name."""


@pytest.mark.parametrize("spoil", REFUSED)
def test_what_cannot_work_is_one_paragraph_and_nothing_is_left(
    warm: WarmPython, tmp_path: Path, policy: dict[str, Any], spoil: Callable[..., None], said: Said
) -> None:
    spoil(tmp_path, policy)

    done = grpo(warm, tmp_path, policy)

    assert done.code == 2, done.out + done.err
    assert lacks(done.err, REFUSED[spoil]) == []
    assert "Traceback" not in done.err
    said(re.sub(r"\brow \d+", "row N", done.err.strip()))  # of one rank, which speaks for all
    assert not (tmp_path / "runs" / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reward", "fault"), [("broken", "reward/error"), ("words", "reward/error"), ("hangs", "reward/timeout")]
)
def test_rewards_that_fail_are_counted_and_named_and_the_run_goes_on(
    warm: WarmPython, tmp_path: Path, policy: dict[str, Any], reward: str, fault: str
) -> None:
    failing = policy | {
        "steps": 2,
        "reward": {"path": f"rewards.py:{reward}"},
        "rewards": {"timeout_seconds": 1.5},  # as long as a busy machine may keep a sound answer waiting
        "data": policy["data"] | {"batch_size": 2},
    }

    done = grpo(warm, tmp_path, failing)

    assert done.code == 0, done.err
    lines = [line for line in read_metrics(tmp_path / "runs" / "run" / "metrics.jsonl") if "loss" in line]
    assert [line[fault] for line in lines] == [4.0 if reward == "hangs" else 8.0] * 2
    assert "warning: " in done.out
    assert reward in done.out


def test_a_batched_reward_with_one_value_for_all_is_refused_before_the_first_step(
    warm: WarmPython, tmp_path: Path, policy: dict[str, Any], said: Said
) -> None:
    done = grpo(warm, tmp_path, policy | {"reward": {"path": "rewards.py:shared"}})

    assert done.code == 2, done.out + done.err
    assert "reward shared:" in done.err
    assert numbers(done.err) == [4, 1, 1, 4]  # completions and the step, values and completions
    said(done.err.strip())
    assert "Traceback" not in done.err
    assert not (tmp_path / "runs" / "run").exists()


def test_a_batched_reward_that_returns_one_value_for_all_later_is_a_fault_of_these(
    warm: WarmPython, tmp_path: Path, policy: dict[str, Any], said: Said
) -> None:
    done = grpo(warm, tmp_path, policy | {"steps": 2, "reward": {"path": "rewards.py:shared_later"}})

    assert done.code == 0, done.err
    lines = [line for line in read_metrics(tmp_path / "runs" / "run" / "metrics.jsonl") if "loss" in line]
    assert [line.get("reward/error", 0.0) for line in lines] == [0.0, lines[1]["rollout/completions"]]
    assert [line.get("reward") for line in lines] == [1.0, None]
    warning, *_ = warnings_of(done.out, "reward shared_later")
    assert numbers(warning)[:2] == [1, 8]
    said(warning.partition("; sample ")[0])


@pytest.mark.slow
def test_a_run_in_which_nothing_can_be_scored_stops(
    warm: WarmPython, tmp_path: Path, policy: dict[str, Any], said: Said
) -> None:
    done = grpo(warm, tmp_path, policy | {"steps": 5, "reward": {"path": "rewards.py:broken"}})

    assert done.code == 3, done.err
    assert numbers(done.err)[:2] == [3, 3]  # steps in a row, and the last of them
    said(done.err.strip().partition("; sample ")[0])  # the text that was drawn follows
    assert 0 < done.err.index("rewards.max_unscored_steps") < done.err.index("no such answer"), "the fix comes first"
    assert "Traceback" not in done.err
    run = tmp_path / "runs" / "run"
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-00000002"]
    assert not (run / "exports").exists()
    steps = [line for line in read_metrics(run / "metrics.jsonl") if "loss" in line]
    assert ["reward" in line for line in steps] == [False, False], "a mean of no number is no number"

    (tmp_path / "rewards.py").write_text(REWARDS.replace('raise ValueError("no such answer")', "return 1.0"))
    again = grpo(
        warm,
        tmp_path,
        policy | {"steps": 3, "reward": {"path": "rewards.py:broken"}},
        "checkpoint.resume.changed=[files]",
    )

    assert again.code == 0, again.err
    assert resumed_at(again.out) == 2


@pytest.mark.slow
def test_an_evaluation_says_what_it_could_not_score_and_fails_if_that_is_everything(
    warm: WarmPython, tmp_path: Path, policy: dict[str, Any], said: Said
) -> None:
    write_rows(tmp_path / "held.jsonl", [{"prompt": f"add {n}=", "answer": str(n)} for n in range(6)])
    tree = policy | {"evaluation": {"sets": {"held": {"path": "held.jsonl"}}, "at_end": False}, "steps": 1}
    write_run(tmp_path / "run.yaml", tree | {"reward": {"path": "rewards.py:moody"}})

    def evaluated() -> Done:
        return warm.run("-m", "holdfast.cli.main", "eval", "run.yaml", cwd=tmp_path)

    half = evaluated()
    trained = grpo(warm, tmp_path, tree | {"reward": {"path": "rewards.py:moody"}})
    write_run(tmp_path / "run.yaml", tree | {"reward": {"path": "rewards.py:broken"}})
    nothing = evaluated()

    assert half.code == 0, half.err
    (warning,) = warnings_of(half.out, " held: ")
    assert numbers(warning)[:3] == [3, 6, 3]  # of 6, and how many by an error
    assert lacks(warning, "moody ValueError: odd") == []
    said(warning.partition("; sample ")[0])
    values = dict(line.split() for line in half.out.splitlines() if line.startswith("eval/"))
    assert (values["eval/held/accuracy"], values["eval/held/reward"]) == ("1", "1")
    assert (values["eval/held/reward/error"], values["eval/held/reward/timeout"]) == ("3", "0")
    assert trained.code == 0, trained.err
    (warning,) = warnings_of(trained.out, " held: ")
    assert numbers(warning)[:3] == [3, 6, 3]
    assert re.search(r"held/reward/error\s3\.0000", trained.out)
    assert "held/reward/timeout" not in trained.out
    assert nothing.code == 1, nothing.err
    assert "accuracy" not in nothing.out
    assert "Traceback" not in nothing.err
    said(nothing.err.strip())


def test_reward_processes_that_die_on_one_rank_end_all_ranks_alike(
    warm: WarmPython, tmp_path: Path, policy: dict[str, Any], said: Said
) -> None:
    done = grpo(warm, tmp_path, policy | {"reward": {"path": "rewards.py:fatal"}})

    assert done.code == 3, done.err
    assert "signal 9" in done.err
    log = (tmp_path / "runs" / "run" / "logs" / "rank-1.log").read_text()
    assert "signal 9" in log
    for text in (done.err, log):
        assert not re.search("without|failed|Traceback", text)
    said(re.sub(r"rewards-\S+\.log", "rewards-HOST-PID.log", done.err.strip()))


@pytest.mark.slow
def test_a_rank_whose_rewards_all_hang_does_not_keep_the_others_waiting_too_long(
    warm: WarmPython, tmp_path: Path, policy: dict[str, Any]
) -> None:
    """Sixteen times 2 s on one worker are 32 s, and the other rank waits for 15 s."""
    tree = policy | {
        "steps": 1,
        "reward": {"path": "rewards.py:hangs_on_one_rank"},
        "rewards": {"workers": 1, "timeout_seconds": 2},
        "rollout": {"group_size": 8, "max_new_tokens": 2},
        "launch": {"ranks": 2, "device": "cpu", "timeout_minutes": 0.25},
    }

    done = grpo(warm, tmp_path, tree)

    assert done.code == 0, done.err
    (line,) = (line for line in read_metrics(tmp_path / "runs" / "run" / "metrics.jsonl") if "loss" in line)
    assert line["reward/timeout"] == 16
    assert line["timing/reward"] == pytest.approx(11.25, abs=3)


@pytest.mark.slow
def test_a_reward_file_with_the_name_of_a_standard_module_shadows_nothing(
    holdfast: Callable[..., Done], tmp_path: Path, policy: dict[str, Any]
) -> None:
    (tmp_path / "random.py").write_text("raise RuntimeError('imported in the place of the library')\n")
    (tmp_path / "sibling.py").write_text("VALUE = 0.25\n")
    (tmp_path / "math.py").write_text("from sibling import VALUE\ndef compute_score(completion):\n    return VALUE\n")
    write_run(tmp_path / "run.yaml", policy | {"steps": 1, "reward": {"path": "math.py:compute_score"}})

    done = holdfast("grpo", "run.yaml", "launch.ranks=1")

    assert done.code == 0, done.err
    (line,) = (line for line in read_metrics(tmp_path / "runs" / "run" / "metrics.jsonl") if "loss" in line)
    assert line["reward"] == 0.25


@pytest.mark.slow
def test_a_reward_of_trl_s_form_is_told_the_step(warm: WarmPython, tmp_path: Path, policy: dict[str, Any]) -> None:
    done = grpo(warm, tmp_path, policy | {"reward": {"path": "rewards.py:told"}})

    assert done.code == 0, done.err
    lines = [line for line in read_metrics(tmp_path / "runs" / "run" / "metrics.jsonl") if "loss" in line]
    assert [line["reward"] for line in lines] == pytest.approx([0, 1 / 3, 2 / 3])


@pytest.mark.slow
def test_a_constant_reward_trains_nothing_and_is_visible(
    warm: WarmPython, tmp_path: Path, policy: dict[str, Any]
) -> None:
    """Its alarm says to read samples.jsonl: they are there, though all groups are dropped and no table is shown."""
    silent = policy["rollout"] | {"show": 0}
    changes = {"reward": {"path": "rewards.py:constant"}, "groups": {"flat": "drop"}, "rollout": silent}

    done = grpo(warm, tmp_path, policy | changes)

    assert done.code == 0, done.err
    assert not re.search(r"completions \w+ step", done.out)
    samples = [json.loads(line) for line in (tmp_path / "runs" / "run" / "samples.jsonl").read_text().splitlines()]
    assert {sample["trained"] for sample in samples} == {False}
    assert len([sample for sample in samples if sample["step"] == 1]) == 16
    lines = [line for line in read_metrics(tmp_path / "runs" / "run" / "metrics.jsonl") if "loss" in line]
    assert [(line["reward"], line["frac_reward_zero_std"], line["grad_norm"]) for line in lines] == [
        (1.0, 1.0, 0.0)
    ] * 3
