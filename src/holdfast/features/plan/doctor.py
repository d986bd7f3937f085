"""Runs the checks of `holdfast doctor`, and prints the facts for a bug report (`holdfast env`)."""

from __future__ import annotations

import json
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from holdfast.config.load import LoadedConfig
from holdfast.config.sections.launch import LaunchConfig
from holdfast.config.verbs.roots import load_run
from holdfast.config.verbs.training import TrainingConfig
from holdfast.config.versions import versions
from holdfast.errors import ConfigError, HoldfastError
from holdfast.files import size_words
from holdfast.launch.environment import (
    cuda_devices,
    inherited,
    is_first_rank,
    nvidia_smi,
    resolve_ranks,
    under_torchrun,
    world_size,
)
from holdfast.processor import usable_cores

if TYPE_CHECKING:
    from holdfast.features.plan.checks.findings import Check, Finding


def doctor(
    path: Path | None, overrides: Sequence[str], *, runs_code: bool, as_json: bool, only: Sequence[str] = ()
) -> int:
    """Print what was looked at, and what was not, one line each; return 1 where something fails.

    Raises:
        ConfigError: `only` names a check that there is not.
    """
    from holdfast.features.plan.checks.findings import RANKS, Grade, findings_of

    counts: Counter[Grade] = Counter()
    findings: list[Finding] = []
    checks = _chosen(list(_checks(path, overrides, findings, runs_code=runs_code)), only)
    if not is_first_rank():  # under torchrun: it is there to be met
        findings = list(findings_of([check for check in checks if check.name == RANKS]))
        return int(any(finding.grade is Grade.fail for finding in findings))
    for finding in findings_of([told(check) for check in checks]):
        counts[finding.grade] += 1
        findings.append(finding)
        if not as_json:
            typer.echo(finding.line())
    if as_json:
        typer.echo(json.dumps({"findings": [finding.as_plain() for finding in findings]}, indent=2))
    else:
        typer.echo(", ".join(f"{count} {grade.value}" for grade, count in sorted(counts.items())))
    return int(counts[Grade.fail] > 0)


def told(check: Check, after_seconds: float = 1.0) -> Check:
    """Return a check that is named on standard error once it has lasted for some time."""
    from holdfast.features.plan.checks.findings import Check

    def look() -> Iterator[Finding]:
        news = threading.Timer(after_seconds, lambda: typer.echo(f"looking at {check.name}", err=True))
        news.daemon = True
        news.start()
        try:
            yield from check.look()
        finally:
            news.cancel()

    return Check(check.name, look)


def _chosen(checks: list[Check], only: Sequence[str]) -> list[Check]:
    names = {check.name: None for check in checks}
    if unknown := [name for name in only if name not in names]:
        message = f"--only {unknown[0]}: there is no such check here; there are {', '.join(names)}."
        raise ConfigError(message)
    return [check for check in checks if check.name in (only or names)]


def _checks(
    path: Path | None, overrides: Sequence[str], findings: Sequence[Finding], *, runs_code: bool
) -> Iterator[Check]:
    """Yield what is looked at, in order; `findings` are those so far, whenever a check asks."""
    from holdfast.features.plan.checks.findings import Check, Grade, fail, ok, unknown
    from holdfast.features.plan.checks.machine import checks_of_machine
    from holdfast.features.plan.checks.trial import TRIAL, look_at_trial
    from holdfast.launch.start import check_paths

    if path is None:
        yield from checks_of_machine(LaunchConfig())
        return
    try:
        loaded = load_run(path, overrides)
    except ConfigError as error:
        sentence = str(error)
        yield Check("configuration", lambda: iter([fail("configuration", sentence)]))
        yield from checks_of_machine(LaunchConfig())
        return
    config = loaded.config

    def paths() -> Iterator[Finding]:
        check_paths(config.verb, config, loaded.base)
        yield ok("configuration", f"{path} is a file for `holdfast {config.verb}`, and what it names is there")

    def trial() -> Iterator[Finding]:
        if any(finding.grade is Grade.fail for finding in findings):
            yield unknown(TRIAL, "not tried, for what fails above")
        else:
            yield from look_at_trial(config, path, overrides, runs_code=runs_code)

    yield Check("configuration", paths)
    yield from checks_of_machine(config.launch, compiles=config.compiles_blocks("cuda"))
    yield from _checks_of_memory(loaded, runs_code=runs_code)
    yield Check(TRIAL, trial)


def _checks_of_memory(loaded: LoadedConfig[TrainingConfig], *, runs_code: bool) -> Iterator[Check]:
    """Yield the checks of disk, weights and device memory; the first one that asks makes the plan."""
    from holdfast.features.plan.checks.findings import Check, unknown
    from holdfast.features.plan.checks.machine import look_at_place
    from holdfast.features.plan.checks.measured import plan_verdict
    from holdfast.features.plan.checks.model_files import MODEL, look_at_weights
    from holdfast.features.plan.checks.trial import names_code
    from holdfast.features.plan.planning import NoPlan, options_here, planned_apart

    config, base = loaded.config, loaded.base
    if not runs_code:
        config = config.model_copy(update={"model": config.model.model_copy(update={"trust_remote_code": False})})

    @cache
    def planned() -> dict[str, Any] | HoldfastError:
        if not runs_code and names_code(config):
            return NoPlan("not executed (--no-code): the configuration names code of yours")
        ranks = world_size() if under_torchrun() else resolve_ranks(config.launch)
        try:
            return planned_apart(LoadedConfig(config, base), options_here(config.launch, ranks))
        except HoldfastError as error:
            return error

    def checkpoint_bytes() -> int | None:
        plan = planned()
        return None if isinstance(plan, HoldfastError) else plan["checkpoint_bytes"]

    def fits() -> Iterator[Finding]:
        plan = planned()
        if isinstance(plan, HoldfastError) and not isinstance(plan, NoPlan):
            raise plan
        yield unknown("plan", str(plan)) if isinstance(plan, NoPlan) else plan_verdict(plan)

    yield Check("place", lambda: look_at_place(config, checkpoint_bytes))
    yield Check(MODEL, lambda: look_at_weights(config, base, runs_code=runs_code))
    yield Check("plan", fits)


_TOLD_VARIABLES = (
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "HF_HUB_OFFLINE",
    "LOCAL_WORLD_SIZE",
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TOKENIZERS_PARALLELISM",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "WORLD_SIZE",
)
"""Variables whose values `holdfast env` prints. None of them holds a secret, a user's path or a user's name."""
_PLAIN = re.compile(r"[\w.,:=^-]{1,80}")


def machine_facts(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the facts of a machine for a bug report: versions, cores, memory, GPUs, and the variables listed above.

    Host name, user name and all other variables are left out.
    """
    environ = inherited({}) if environ is None else environ
    facts = versions() | {
        "cores": str(usable_cores()),
        "memory": size_words(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        "gpus": str(cuda_devices(environ)),
    }
    gpus = nvidia_smi(environ, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader") or []
    facts |= {f"gpu {number}": line.strip() for number, line in enumerate(gpus)}
    variables = {name: environ[name] for name in _TOLD_VARIABLES if name in environ}
    return facts | {name: value if _PLAIN.fullmatch(value) else "(set)" for name, value in variables.items()}


def environment(*, as_json: bool) -> None:
    """Print versions, the machine, and the variables that decide how a run behaves; no secret, no path, no name."""
    facts = machine_facts()
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    for name, value in facts.items():
        typer.echo(f"{name} {value}")
