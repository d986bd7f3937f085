"""The checks of `holdfast doctor` on a run's inputs: tokenizer, rows, batches, rewards, endpoints, existing files."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from holdfast.checkpoint.errors import CheckpointError, NoCheckpoint
from holdfast.checkpoint.format.verification import check_names, read_manifest
from holdfast.checkpoint.keep.retention import steps
from holdfast.checkpoint.place.storage import open_storage
from holdfast.config.base import LEFT_OUT, Section, leaves
from holdfast.config.public import HASHED, WHOLE, public_configuration
from holdfast.config.sections.engine import VLLMEngineConfig
from holdfast.config.sections.reward import CodeConfig, JudgeConfig, ModelRewardConfig, UserRewardConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.config.verbs.roots import load_run
from holdfast.config.verbs.training import TrainingConfig, as_plain
from holdfast.data.content.formats import Conversation, prompt_of
from holdfast.data.content.lengths import unexpected
from holdfast.data.survey import Survey
from holdfast.errors import ConfigError, HoldfastError
from holdfast.features.plan.checks.compilers import look_at_compilers
from holdfast.features.plan.checks.findings import RANKS, Check, Finding, Grade, fail, ok, since, unknown, warn
from holdfast.features.plan.checks.machine import (
    look_at_devices,
    look_at_place,
    look_at_ranks,
    look_at_versions,
    storage_of_run,
)
from holdfast.features.plan.checks.measured import look_at_plan
from holdfast.features.plan.checks.model_files import MODEL, look_at_weights
from holdfast.features.plan.checks.servers import look_at_servers
from holdfast.files import size_words
from holdfast.http import Endpoint, EndpointRefuses, EndpointUnwell, api_key
from holdfast.models.files.origin import load_tokenizer
from holdfast.parallel.mesh import mesh_shape
from holdfast.rewards.base import Sample
from holdfast.training.directory import checkpoint_place, run_directory
from holdfast.training.policy.rewards import RewardScorer
from holdfast.training.run import ConfiguredRun
from holdfast.training.setup.rows import open_data

FIRST_ROWS = 64
_TEXT = "What is 12 + 30? It is 42.\n\tdef f(x):  return 'déjà vu, 你好 🙂'"
_TEMPLATE = "Look with `holdfast data preview`; set data.chat_template to a template that does."
_SAMPLES = 2
_SLOW_SECONDS = 1.0
"""Of a reward for one sample."""
_SHOWN = 6
_COMPARED = replace(HASHED, text=str)
_DOCTOR_ENDPOINT_SECONDS = 5.0
"""For an endpoint to name its models."""


@dataclass(frozen=True)
class CheckedRun:
    """The configuration of a run whose inputs are checked.

    `survey` reads its first rows as `holdfast data check` does; `runs_code` lets files of the user's be run.
    """

    config: TrainingConfig
    base: Path
    ranks: int
    survey: Callable[[TrainingConfig, Path, int], Survey]
    planned: Callable[[], Mapping[str, Any]]
    """Makes the plan of the run, once; raises a HoldfastError where there is none."""
    runs_code: bool = True

    @property
    def directory(self) -> Path:
        """The run's directory."""
        return run_directory(self.config)

    @property
    def checkpoints(self) -> str | Path:
        """The path or address of the run's checkpoints."""
        return checkpoint_place(self.directory, self.config)


def look_at_tokenizer(run: CheckedRun) -> Iterator[Finding]:
    """Encode and decode a text, and write a conversation in the chat template."""
    tokenizer = load_tokenizer(run.config.model, run.base)
    tokens = tokenizer(_TEXT, add_special_tokens=False)["input_ids"]
    text = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    summary = f"{len(tokenizer):,} tokens"
    if tokenizer.eos_token_id is None:
        yield fail("tokenizer", f"{summary}, and none ends a text", "Give the tokenizer an eos_token.")
        return
    if tokenizer.chat_template is not None:
        turns = [{"role": "user", "content": "What is 12 + 30?"}, {"role": "assistant", "content": "42"}]
        try:
            rendered = str(tokenizer.apply_chat_template(turns, tokenize=False))
        except Exception as error:  # noqa: BLE001 - a template of somebody else's
            yield fail(
                "tokenizer", f"{summary}; its chat template fails: {error}", "Mend it, or set data.chat_template."
            )
            return
        text_tokens = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        direct_tokens = tokenizer.apply_chat_template(turns, tokenize=True, return_dict=False)
        if list(text_tokens) != list(direct_tokens):
            yield warn(
                "tokenizer", f"{summary}; a rendered conversation is read back as other tokens than it was made of"
            )
        summary += ", with a chat template"
    else:
        summary += ", without a chat template"
    if text != _TEXT:
        yield warn("tokenizer", f"{summary}; of {_TEXT!r} it gives back {text!r}", "Rows that hold such text lose it.")
        return
    yield ok("tokenizer", f"{summary}; a text comes back as it was")


def look_at_first_rows(run: CheckedRun) -> Iterator[Finding]:
    """Read the first rows as the run will, and see how batches come out."""
    survey = run.survey(run.config, run.base, FIRST_ROWS)
    if not survey.measured:
        yield fail(
            "rows", f"{survey.source}: nothing of its first rows can be trained on", "See `holdfast data check`."
        )
        return
    tokens = f"{survey.mean_length:,.0f} tokens in the mean, longest {survey.longest:,}"
    summary = f"{survey.source}: first {survey.rows} rows, {tokens}"
    if survey.mistaken_rows:
        yield fail("rows", f"{summary}; {survey.mistakes[0]}", "See `holdfast data check`.")
    elif survey.cut:
        fix = f"data.max_length: {survey.length_for(1.0)} has room for all of these."
        yield warn("rows", f"{summary}; {survey.cut} are longer than {survey.max_length}", fix)
    else:
        yield ok("rows", summary)
    for sentence in unexpected(survey.counts):
        yield warn("rows", f"{survey.source}: of the first {survey.rows} rows, {sentence}", _TEMPLATE)
    yield from _look_at_batches(run, survey.mean_length)


def _look_at_batches(run: CheckedRun, mean_length: float) -> Iterator[Finding]:
    config, data = run.config, run.config.data
    replicate, shard = mesh_shape(config.parallel, run.ranks)
    sequences, summary = data.batch_size, f"{data.batch_size} sequences a step"
    if isinstance(config, GRPOConfig):
        sequences = data.batch_size * config.rollout.group_size // config.updates.mini_batches
        summary = f"{data.batch_size} prompts x {config.rollout.group_size} completions a step, {sequences} an update"
        mean_length += config.rollout.max_new_tokens
    context = config.parallel.context
    groups, group = run.ranks // context, "ranks" if context == 1 else f"groups of {context} ranks"
    per_group = sequences / groups
    split = f"{run.ranks} ranks ({replicate} x {shard}), {per_group:,.1f} sequences each"
    if context > 1:
        split = f"{run.ranks} ranks, {per_group:,.1f} sequences for {context} ranks that share rows"
    if sequences < groups:
        text = f"{summary} are fewer than {groups} {group}: {groups - sequences} have nothing to do"
        yield warn("batches", text, f"Raise data.batch_size to {groups} or more, or lower launch.ranks.")
        return
    budget = data.tokens_per_micro_batch * context
    micro_batches = max(1, -(-int(per_group * mean_length) // budget))
    yield ok("batches", f"{summary} over {split}, about {micro_batches} micro-batches of {budget:,} tokens")


def look_at_rewards(run: CheckedRun) -> Iterator[Finding]:
    """Score two samples with each reward function, in processes that are ended where they hang."""
    assert isinstance(run.config, GRPOConfig)
    functions = [reward for reward in run.config.reward if not isinstance(reward, ModelRewardConfig)]
    for reward in run.config.reward:
        if isinstance(reward, ModelRewardConfig):
            yield unknown("rewards", f"{reward.label} is a model, which is not loaded here")
    if not run.runs_code:
        unrun_rewards = [reward for reward in functions if isinstance(reward, UserRewardConfig | CodeConfig)]
        functions = [reward for reward in functions if reward not in unrun_rewards]
        for reward in unrun_rewards:
            yield unknown("rewards", f"{reward.label} is not run (--no-code)")
    samples = _samples(run)
    for reward in functions:
        yield from _try_reward(run, reward, samples)


def _samples(run: CheckedRun) -> list[Sample]:
    """Return the first rows with a completion for each: the answer of the row, or a word if it has none."""
    source = open_data(ConfiguredRun(config=run.config, base=run.base)).training[0]
    samples = []
    for number, row in enumerate(islice(source.scan(0), _SAMPLES)):
        prompt = prompt_of(row, f"{source.name} row {number}")
        text = str(prompt.messages[-1]["content"]) if isinstance(prompt, Conversation) else prompt
        answer = next((str(row[name]) for name in ("completion", "answer", "solution") if row.get(name)), "42")
        samples.append(Sample(number, text, answer, [1], [1], "stop", row))
    return samples


def _try_reward(run: CheckedRun, reward: Any, samples: list[Sample]) -> Iterator[Finding]:
    assert isinstance(run.config, GRPOConfig)
    section = run.config.rewards.model_copy(update={"workers": 1})
    alone = run.config.model_copy(update={"reward": [reward], "rewards": section})
    with tempfile.TemporaryDirectory(prefix="holdfast-doctor-") as logs:
        scorer = RewardScorer(ConfiguredRun(config=alone, base=run.base), section, {}, Path(logs))
        try:
            start = time.perf_counter()
            scorer.start()
            started, begun = since(start), time.perf_counter()
            outcomes = scorer.outcomes(reward.label, samples)
        except ConfigError as error:
            yield fail("rewards", f"{reward.label}: {error}")
            return
        finally:
            scorer.close()
    seconds = (time.perf_counter() - begun) / max(len(samples), 1)
    faults = [outcome for outcome in outcomes if outcome.fault is not None]
    if any(outcome.fault == "timeout" for outcome in faults):
        text = f"{reward.label} hangs: {faults[0].message}"
        yield fail(
            "rewards",
            text,
            "Mend it; a run would drop or punish every completion. rewards.timeout_seconds is the limit.",
        )
    elif faults:
        grade = fail if len(faults) == len(outcomes) and faults[0].fault != "none" else warn
        yield grade("rewards", f"{reward.label} {faults[0].message}", "It was tried on the first rows' own answers.")
    else:
        values = ", ".join(f"{outcome.value:g}" for outcome in outcomes if outcome.value is not None)
        text = f"{reward.label} gives {values} in {1000 * seconds:,.0f} ms a sample, {started} to start"
        yield warn("rewards", f"{text}, which is slow") if seconds > _SLOW_SECONDS else ok("rewards", text)


def endpoints_of(section: Section, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every part of a configuration that has an address, with its key."""
    if getattr(section, "url", None) is not None and hasattr(section, "api_key_variable"):
        yield path, section
    for name in type(section).model_fields:
        value = getattr(section, name)
        members: Mapping[str, Any] = {name: value}
        if isinstance(value, list | tuple):
            members = {f"{name}[{index}]": member for index, member in enumerate(value)}
        for key, member in members.items():
            if isinstance(member, Section):
                yield from endpoints_of(member, f"{path}.{key}".lstrip("."))


def look_at_endpoints(run: CheckedRun) -> Iterator[Finding]:
    """Ask each endpoint for the names of its models, and see whether servers that the run starts can be."""
    for key, section in endpoints_of(run.config):
        if isinstance(section, VLLMEngineConfig) and section.start is not None:
            yield look_at_servers(run.config, key, section, lambda: _bytes_of(run, "export_bytes"))
            continue
        secret = api_key(section.api_key_variable, key)
        addresses = (
            [section.url] if isinstance(section.url, str) else [f"{address.rstrip('/')}/v1" for address in section.url]
        )
        for url in addresses:
            yield _asked(key, section, url, secret)


def _asked(key: str, section: Any, url: str, secret: str | None) -> Finding:
    endpoint = Endpoint(url, secret, _DOCTOR_ENDPOINT_SECONDS, attempts=1)
    start = time.perf_counter()
    try:
        listed = endpoint.ask("GET", "/models")
    except EndpointUnwell as error:
        return fail("endpoints", f"{key}: {url} {error}", "Start it, or mend url.")
    except EndpointRefuses as error:
        grade = warn if isinstance(section, JudgeConfig) else fail
        return grade("endpoints", f"{key}: {url}/models {error}", "Mend url, or the key.")
    data = listed.get("data", []) if isinstance(listed, dict) else []
    names = [str(model.get("id")) for model in data if isinstance(model, dict)]
    if section.model is not None and names and section.model not in names:
        return fail("endpoints", f"{key}: {url} serves {', '.join(names[:_SHOWN])}", f"{key}.model is {section.model}.")
    if not names:
        return unknown("endpoints", f"{key}: {url} answers ({since(start)}), and does not say which models it serves")
    return ok("endpoints", f"{key}: {url} serves {', '.join(names[:_SHOWN])} ({since(start)})")


def look_at_resume(run: CheckedRun) -> Iterator[Finding]:
    """Report what the run would find in its directory, and from which step it would continue."""
    if not run.directory.exists():
        yield ok("resume", f"{run.directory} is not there: the run begins anew")
        return
    storage = open_storage(run.checkpoints)
    damaged: list[str] = []
    for step, name in reversed(steps(storage).items()):
        try:
            manifest = read_manifest(storage, name)
            check_names(storage, name, manifest)
        except (CheckpointError, NoCheckpoint) as error:
            damaged.append(f"{name}: {error}")
            continue
        remaining = "" if run.config.steps is None else f", {max(0, run.config.steps - step)} steps are left"
        summary = f"the run would go on from step {step} ({size_words(manifest.bytes_)}){remaining}"
        changed = changed_keys(run)
        if damaged:
            yield warn(
                "resume", f"{summary}; newer ones are damaged: {damaged[0]}", "See `holdfast checkpoint verify`."
            )
        elif changed:
            yield warn("resume", f"{summary}, with other values than it had: {', '.join(changed[:_SHOWN])}")
        else:
            yield ok("resume", f"{summary}; its files have the names and sizes of its manifest, and were not read")
        return
    if damaged:
        yield fail("resume", f"no checkpoint can be read: {damaged[0]}", "See `holdfast checkpoint verify`.")
    else:
        yield ok("resume", f"{run.directory} has no checkpoint: the run begins anew")


_SETTLED = {"checkpoint.frozen", "model.frozen_dtype"}
"""Keys for whose `auto` a run records what it stood for, and follows that when it is continued."""


def changed_keys(run: CheckedRun) -> list[str]:
    """Return the keys whose values differ from those of the existing run; `run.*` and `launch.*` are not compared."""
    file = run.directory / "config.resolved.yaml"
    if not file.exists():
        return []
    try:
        previous = as_plain(load_run(file, []).config)
    except ConfigError:
        return []  # of an earlier version
    before, after = _told(previous), _told(as_plain(run.config))
    unseen = ("", None)
    changes = [(key, before.get(key, unseen), after.get(key, unseen)) for key in sorted({*before, *after})]
    return [
        f"{key} changed" if old[1] == new[1] else f"{key} {old[1]} -> {new[1]}"
        for key, old, new in changes
        if old[0] != new[0]
        and not key.startswith(("run.", "launch."))
        and not (key in _SETTLED and "auto" in {old[1], new[1]})
    ]


def _told(tree: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return each leaf of a configuration as it is compared, and as it is shown."""
    compared, shown = (dict(leaves(public_configuration(tree, form), into_lists=True)) for form in (_COMPARED, WHOLE))
    return {key: (value, shown.get(key, LEFT_OUT)) for key, value in compared.items()}


def bytes_of_checkpoints(run: CheckedRun) -> int | None:
    """Return the planned bytes of all kept checkpoints and two more; None if there is no plan."""
    size, keep = _bytes_of(run, "checkpoint_bytes"), run.config.checkpoint.keep
    return None if size is None else size * (keep.last + sum(best.count for best in keep.best) + 2)


def _bytes_of(run: CheckedRun, name: str) -> int | None:
    try:
        return int(run.planned()[name])
    except (HoldfastError, OSError):
        return None  # the check of the plan says why


def checks_of_run(run: CheckedRun) -> list[Check]:
    """Return what `holdfast doctor` looks at of a run, in the order in which it would be met.

    Nothing is left behind: what is tried in the place of a run is removed, and no run directory is made.
    """
    launch = run.config.launch
    refused: list[Finding] = []

    def place() -> Iterator[Finding]:
        for finding in look_at_place(storage_of_run(run.checkpoints), bytes_of_checkpoints(run)):
            refused.extend([finding] if finding.grade is Grade.fail else [])
            yield finding

    def ranks() -> Iterator[Finding]:  # they meet without a place that cannot be written
        yield from look_at_ranks(launch, None if refused else storage_of_run(run.checkpoints))

    checks = [
        Check("versions", look_at_versions),
        Check("devices", lambda: look_at_devices(launch)),
        Check("compilers", lambda: look_at_compilers(launch) if run.config.compiles_blocks("cuda") else iter(())),
        Check("place", place),
        Check(RANKS, ranks),
        Check("tokenizer", lambda: look_at_tokenizer(run)),
        Check(MODEL, lambda: look_at_weights(run.config, run.base, runs_code=run.runs_code)),
        Check("rows", lambda: look_at_first_rows(run)),
    ]
    if isinstance(run.config, GRPOConfig):
        checks.append(Check("rewards", lambda: look_at_rewards(run)))
    return [
        *checks,
        Check("endpoints", lambda: look_at_endpoints(run)),
        Check("resume", lambda: look_at_resume(run)),
        Check("plan", lambda: look_at_plan(run.directory)),
    ]
