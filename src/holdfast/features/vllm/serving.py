"""`holdfast serve`: starts vLLM servers with the flags that a run needs. `rollout.engine.start` starts them with it."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from holdfast.config.load import LoadedConfig
from holdfast.config.sections.engine import VLLMEngineConfig
from holdfast.config.verbs.distill import DistillConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.config.verbs.roots import engine_of, load_run
from holdfast.config.verbs.training import TrainingConfig, as_plain
from holdfast.errors import ConfigError
from holdfast.features.vllm.lora import AdapterLimits, limits_of, why_merged
from holdfast.features.vllm.placement import gpus_of_servers, planned_gpus
from holdfast.features.vllm.processes import Servers, ServerSpec, command_of, keep_logs
from holdfast.files import python_module
from holdfast.launch.environment import computes_on_cpu, visible_names
from holdfast.training.directory import run_directory


def serve(path: Path, overrides: Sequence[str]) -> int:
    """Start the servers of a run, and stay until a signal comes; return the exit code."""
    loaded = load_run(path, overrides)
    _refuse_unserved(path, loaded.config)
    section = engine_of(loaded.config)
    assert section is not None
    if section.start is None:
        loaded = load_run(path, [*overrides, "rollout.engine.start=true"])
    # SIGTERM would end Python at once and leave the servers running; as KeyboardInterrupt it leaves the `with` block.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with servers_of(loaded):
            print(f"serving at {', '.join(section.url)}; weights come with the run's first push", flush=True)
            while True:
                signal.pause()
    except KeyboardInterrupt:
        return 0


def _refuse_unserved(path: Path, config: TrainingConfig) -> None:
    """Refuse a run that has no servers.

    Raises:
        ConfigError: Its completions come from elsewhere, or it samples none.
    """
    if engine_of(config) is not None:
        return
    rollout = config.rollout if isinstance(config, GRPOConfig | DistillConfig) else None
    why = (
        f"a run of `holdfast {config.verb}` samples nothing"
        if rollout is None
        else f"rollout.engine of this run is {rollout.engine.kind}"
    )
    raise ConfigError(
        f"{path}: `holdfast serve` starts the servers of vLLM that a run samples from, and {why}, so there is none to "
        "start. In a run of `holdfast grpo` or `holdfast distill` write rollout.engine: {kind: vllm, url: "
        "http://127.0.0.1:8700, python: .venv-vllm/bin/python}; docs/vllm.md says more."
    )


def refuse_starting(config: TrainingConfig) -> None:
    """Refuse servers beside ranks that somebody else has started: nobody here would end them.

    Raises:
        ConfigError: The run asks for some.
    """
    section = engine_of(config)
    if section is not None and section.start:
        raise ConfigError(
            "rollout.engine.start: these ranks were started by torchrun or a scheduler, and servers are started by "
            "our launcher alone. Run `holdfast serve RUN.yaml` first, and set rollout.engine.start: false."
        )


def servers_of(loaded: LoadedConfig[TrainingConfig]) -> AbstractContextManager[None]:
    """Return a context in which the servers of a run live, if it asks for that."""
    section = engine_of(loaded.config)
    return nullcontext() if section is None or section.start is None else _servers(loaded, section)


@contextmanager
def _servers(loaded: LoadedConfig[TrainingConfig], section: VLLMEngineConfig) -> Iterator[None]:
    config = loaded.config
    gpus = gpus_of_servers(config, section)
    with tempfile.TemporaryDirectory(prefix="holdfast-servers-") as name:
        folder = Path(name)
        visible = {url: visible_names(own) for url, own in zip(section.url, gpus, strict=True)}
        served = _spec(config, section, folder, on_cpu=computes_on_cpu(config.launch), visible=visible)
        file = folder / "config.json"
        file.write_text(json.dumps(as_plain(config)), encoding="utf-8")
        module = "holdfast.features.vllm.server_files"
        command = [*python_module(module), config.verb, str(file), str(loaded.base), str(served.model)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise ConfigError(
                result.stderr.strip().splitlines()[-1] if result.stderr.strip() else "No model for servers."
            )
        print(f"starting {len(section.url)} servers of vLLM ({folder}/server-N.log)", flush=True)
        for line in _command_lines(served):
            print(f"  {line}", flush=True)
        try:
            with Servers(served):
                yield
        finally:
            keep_logs(folder, run_directory(config))


def planned_commands(config: TrainingConfig, ranks: int, *, on_cpu: bool) -> list[str]:
    """Return the command lines of the servers that a run would start on a machine that has enough GPUs.

    Args:
        config: Of the run.
        ranks: How many it would have.
        on_cpu: Whether it would compute on CPUs.
    """
    section = engine_of(config)
    if section is None or section.start is None:
        return []
    placed = [[] for _ in section.url] if on_cpu else planned_gpus(section, ranks)
    visible = {url: ",".join(map(str, gpus)) for url, gpus in zip(section.url, placed, strict=True)}
    return _command_lines(_spec(config, section, Path("SERVER_FILES"), on_cpu=on_cpu, visible=visible))


def _command_lines(served: ServerSpec) -> list[str]:
    gpus = [served.visible.get(url) for url in served.section.url]
    commands = [shlex.join(command_of(served, url)) for url in served.section.url]
    return [
        f"CUDA_VISIBLE_DEVICES={own} {command}" if own else command for own, command in zip(gpus, commands, strict=True)
    ]


def _spec(
    config: TrainingConfig, section: VLLMEngineConfig, folder: Path, *, on_cpu: bool, visible: Mapping[str, str]
) -> ServerSpec:
    start, longest = section.start, _longest(config)
    if start is not None and start.max_model_len is not None and start.max_model_len < longest:
        raise ConfigError(
            f"rollout.engine.start.max_model_len is {start.max_model_len}, and a prompt with its completion may have "
            f"{longest} tokens. Use at least {longest}, or leave it out."
        )
    dtype = config.parallel.compute_dtype
    if dtype == "auto":
        # As the trainer does: on the CPU it computes in bfloat16 only what it stores so.
        dtype = "bfloat16" if not on_cpu or config.model.dtype == "bfloat16" else "float32"
    return ServerSpec(
        section,
        folder / "model",
        section.model or "policy",
        dtype,
        longest,
        on_cpu,
        folder,
        adapters=_adapter_limits(config, section),
        visible=visible,
    )


def _adapter_limits(config: TrainingConfig, section: VLLMEngineConfig) -> AdapterLimits | None:
    """Return the limits of servers that take adapters; None where whole weights are pushed."""
    lora = config.model.lora
    if lora is None or section.push == "weights" or why_merged(lora):
        return None
    return limits_of(lora, config.rollout.max_staleness if isinstance(config, GRPOConfig) else 0)


def _longest(config: TrainingConfig) -> int:
    longest = config.data.max_length
    if isinstance(config, GRPOConfig):
        longest = max(longest, config.longest_prompt + (config.evaluation.sampling.max_new_tokens or 0))
    return longest
