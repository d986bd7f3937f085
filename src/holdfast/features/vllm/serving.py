"""`holdfast serve`: starts vLLM servers with the flags that a run needs. `rollout.engine.start` starts them with it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
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
from holdfast.features.vllm.processes import Servers, ServerSpec, keep_logs
from holdfast.launch.environment import computes_on_cpu
from holdfast.training.directory import run_directory


def serve(path: Path, overrides: Sequence[str]) -> int:
    """Start the servers of a run, and stay until a signal comes; return the exit code."""
    _refuse_unserved(path, load_run(path, overrides).config)
    loaded = load_run(path, [*overrides, "rollout.engine.start=true"])
    section = engine_of(loaded.config)
    assert section is not None
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
    return nullcontext() if section is None or not section.start else _servers(loaded, section)


@contextmanager
def _servers(loaded: LoadedConfig[TrainingConfig], section: VLLMEngineConfig) -> Iterator[None]:
    config = loaded.config
    with tempfile.TemporaryDirectory(prefix="holdfast-servers-") as name:
        folder = Path(name)
        file, model = folder / "config.json", folder / "model"
        file.write_text(json.dumps(as_plain(config)), encoding="utf-8")
        command = [sys.executable, "-m", "holdfast.features.vllm.server_files", str(file), str(loaded.base), str(model)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise ConfigError(
                result.stderr.strip().splitlines()[-1] if result.stderr.strip() else "No model for servers."
            )
        on_cpu = computes_on_cpu(config.launch)
        dtype = config.parallel.compute_dtype
        if dtype == "auto":
            dtype = "float32" if on_cpu else "bfloat16"
        served = ServerSpec(
            section,
            model,
            section.model or "policy",
            dtype,
            _longest(config),
            on_cpu,
            folder,
            adapters=_adapter_limits(config, section),
        )
        print(f"starting {len(section.url)} servers of vLLM ({folder}/server-N.log)", flush=True)
        try:
            with Servers(served):
                yield
        finally:
            keep_logs(folder, run_directory(config))


def _adapter_limits(config: TrainingConfig, section: VLLMEngineConfig) -> AdapterLimits | None:
    """Return the limits of servers that take adapters; None where whole weights are pushed."""
    lora = config.model.lora
    if lora is None or section.push == "weights" or why_merged(section, lora):
        return None
    return limits_of(lora, config.rollout.max_staleness if isinstance(config, GRPOConfig) else 0)


def _longest(config: TrainingConfig) -> int:
    longest = config.data.max_length
    if isinstance(config, GRPOConfig):
        longest = max(longest, config.longest_prompt + (config.evaluation.sampling.max_new_tokens or 0))
    return longest
