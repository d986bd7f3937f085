"""Call a user's reward function according to its parameter names, so that files for other systems work unchanged.

reward_inputs / reward_input    EasyR1, a list of dicts or one dict
solution_str / solution_strs    verl, one sample or lists
completions or prompts          TRL and our batched form: every argument is a list
anything else                   one sample
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from holdfast.processes.user_code import CannotStart
from holdfast.rewards.base import MissingArgument, Sample

if TYPE_CHECKING:
    import asyncio


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """Return this process's loop: one for its whole life, since clients keep the loop they were first used in."""
    import asyncio  # a worker whose rewards are plain functions never needs it

    return asyncio.new_event_loop()


Many = Callable[[Sequence[Sample]], Any]
One = Callable[[Sample], Any]

_ONE: Mapping[str, One] = {
    "prompt": lambda sample: sample.prompt,
    "completion": lambda sample: sample.completion,
    "prompt_tokens": lambda sample: sample.prompt_tokens,
    "prompt_ids": lambda sample: sample.prompt_tokens,
    "completion_tokens": lambda sample: sample.completion_tokens,
    "completion_ids": lambda sample: sample.completion_tokens,
    "finish": lambda sample: sample.finish,
    "sample_id": lambda sample: sample.sample_id,
}
_MANY: Mapping[str, One] = {
    **{name: value for name, value in _ONE.items() if name not in {"prompt", "completion"}},
    "prompts": lambda sample: sample.row["prompt"] if _is_conversation(sample) else sample.prompt,
    "completions": lambda sample: _answered(sample),  # noqa: PLW0108 - defined below
}
_VERL: Mapping[str, One] = {
    "data_source": lambda sample: sample.row.get("data_source", ""),
    "solution_str": lambda sample: sample.completion,
    "ground_truth": lambda sample: _ground_truth(sample),  # noqa: PLW0108 - defined below
    "extra_info": lambda sample: sample.row.get("extra_info", dict(sample.row)),
}
_VERL_MANY = {"data_sources": "data_source", "solution_strs": "solution_str", "ground_truths": "ground_truth",
              "extra_infos": "extra_info"}  # fmt: skip
_BATCHED = (*_MANY, "log_metric", "log_extra", "trainer_state")
_GIVEN: Mapping[str, Collection[str]] = {
    "reward_inputs": ["reward_inputs"],
    "solution_strs": _VERL_MANY,
    "completions": _BATCHED,
    "prompts": _BATCHED,
    "reward_input": ["reward_input"],
    "solution_str": _VERL,
}
"""What a form fills by name, by the parameter that tells it."""
_WITHOUT_COLUMNS = {"reward_inputs", "solution_strs", "reward_input", "solution_str"}
"""Forms that fill nothing else."""


@dataclass(frozen=True)
class _BoundCall:
    call: Callable[[Any], Any]
    columns: tuple[str, ...] = ()
    """Columns of the row without which it cannot be called."""


class PerSampleCall(_BoundCall):
    """Called with one sample after the other."""


class BatchedCall(_BoundCall):
    """Called with a list of samples."""


class ConcurrentCall(_BoundCall):
    """Called with one sample; its coroutines run side by side."""


Bound = PerSampleCall | BatchedCall | ConcurrentCall


def bind(function: Callable[..., Any], kwargs: Mapping[str, Any], name: str) -> Bound:
    """Recognise a function's signature and bind it to samples.

    Raises:
        CannotStart: It cannot be called by the names of its parameters, an own argument fits none of them, or a
            parameter is none that its form fills.
    """
    parameters = _parameters(function, kwargs, name)
    call = _Call(function, dict(kwargs), parameters)
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    batch_forms: Mapping[str, Many] = {
        "reward_inputs": lambda samples: call.run({"reward_inputs": [_easyr1_input(sample) for sample in samples]}),
        "solution_strs": lambda samples: call.run(
            {plural: [_VERL[name](sample) for sample in samples] for plural, name in _VERL_MANY.items()}
        ),
        "completions": call.batch,
        "prompts": call.batch,
    }
    single_forms: Mapping[str, One] = {
        "reward_input": lambda sample: call.run({"reward_input": _easyr1_input(sample)}, sample.row),
        "solution_str": lambda sample: call.run({name: value(sample) for name, value in _VERL.items()}, sample.row),
    }
    sign = next((sign for sign in (*batch_forms, *single_forms) if sign in parameters), "")
    columns = call.demanded(_GIVEN.get(sign, _ONE))
    if sign in _WITHOUT_COLUMNS and columns:
        raise CannotStart(
            f"reward {name}: by its parameter {sign} it is given {', '.join(_GIVEN[sign])} and nothing else, and it "
            f"also demands {columns[0]}. Give {columns[0]} a default, or name it in kwargs."
        )
    if sign in batch_forms:
        return BatchedCall(_awaited(batch_forms[sign]) if is_async else batch_forms[sign], columns)
    return (ConcurrentCall if is_async else PerSampleCall)(single_forms.get(sign, call.one), columns)


def _parameters(function: Callable[..., Any], kwargs: Mapping[str, Any], name: str) -> Mapping[str, inspect.Parameter]:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise CannotStart(f"reward {name}: its signature cannot be read ({error}). Write it as a def.") from error
    positional = [key for key, item in parameters.items() if item.kind is item.POSITIONAL_ONLY]
    if positional:
        raise CannotStart(
            f"reward {name}: {positional[0]} is positional-only, and arguments are given by name. Remove the slash "
            "from its def."
        )
    by_name = {key: item for key, item in parameters.items() if item.kind is not item.VAR_POSITIONAL}
    if not by_name:
        raise CannotStart(
            f"reward {name}: it takes no named parameter, so it sees nothing. Give it one, for example completion."
        )
    takes_all = any(item.kind is item.VAR_KEYWORD for item in by_name.values())
    strange = [key for key in kwargs if key not in by_name]
    if strange and not takes_all:
        raise CannotStart(
            f"reward {name}: kwargs has {strange[0]}, and the function takes {', '.join(by_name)}. Correct the name, "
            "or add the parameter."
        )
    return by_name


@dataclass(frozen=True)
class _Call:
    """The ways to call one function."""

    function: Callable[..., Any]
    kwargs: dict[str, Any]
    parameters: Mapping[str, inspect.Parameter]

    def demanded(self, filled: Collection[str]) -> tuple[str, ...]:
        """Return the parameters that neither a default, an own argument nor what its form gives would fill."""
        return tuple(
            name
            for name, item in self.parameters.items()
            if item.default is item.empty
            and item.kind is not item.VAR_KEYWORD
            and name not in filled
            and name not in self.kwargs
        )

    def one(self, sample: Sample) -> Any:
        """Call it with one sample."""
        values = {**sample.row, **{name: value(sample) for name, value in _ONE.items()}}
        if sample.messages is not None:
            values["messages"] = sample.messages
        return self.run(values, sample.row)

    def batch(self, samples: Sequence[Sample]) -> Any:
        """Call it with lists, as TRL does."""
        columns = dict.fromkeys(column for sample in samples for column in sample.row)
        values: dict[str, Any] = {column: [sample.row.get(column) for sample in samples] for column in columns}
        values |= {name: [value(sample) for sample in samples] for name, value in _MANY.items()}
        logged: dict[str, float] = {}
        values |= {"log_metric": logged.__setitem__, "log_extra": lambda *_: None, "trainer_state": samples[0].progress}
        return _with_metrics(self.run(values, columns), logged)

    def run(self, values: Mapping[str, Any], columns: Collection[str] = ()) -> Any:
        """Call it with those of the values that its parameters ask for; own arguments go before them.

        Args:
            values: By name.
            columns: Of the rows, for the error.

        Raises:
            MissingArgument: Nothing fills a parameter.
        """
        arguments = {**values, **self.kwargs}
        if any(item.kind is item.VAR_KEYWORD for item in self.parameters.values()):
            accepted = arguments
        else:
            accepted = {name: value for name, value in arguments.items() if name in self.parameters}
        for name, item in self.parameters.items():
            if item.default is item.empty and item.kind is not item.VAR_KEYWORD and name not in accepted:
                raise MissingArgument(
                    f"its parameter {name} is no column of the row and none of its kwargs (columns: "
                    f"{', '.join(map(str, columns)) or 'none'})"
                )
        return self.function(**accepted)


def _with_metrics(answer: Any, logged: Mapping[str, float]) -> Any:
    """Return the results of a batch, or a coroutine of them, each with what the function said to TRL's `log_metric`."""
    if inspect.isawaitable(answer):
        return _later_with_metrics(answer, logged)
    if not logged or not isinstance(answer, list | tuple):
        return answer
    return [result if isinstance(result, Mapping) else {"reward": result, "metrics": logged} for result in answer]


async def _later_with_metrics(answer: Awaitable[Any], logged: Mapping[str, float]) -> Any:
    return _with_metrics(await answer, logged)


def _awaited(call: Callable[[Sequence[Sample]], Awaitable[Any]]) -> Many:
    """Run a coroutine function of a batch to its end."""
    return lambda samples: event_loop().run_until_complete(call(samples))


def _easyr1_input(sample: Sample) -> dict[str, Any]:
    return {
        **sample.row,
        "prompt": sample.prompt,
        "response": sample.completion,
        "response_length": len(sample.completion_tokens),
        "ground_truth": _ground_truth(sample),
    }


def _ground_truth(sample: Sample) -> Any:
    """Return the right answer from where verl, EasyR1 or a plain row keeps it."""
    verl = sample.row.get("reward_model")
    if isinstance(verl, Mapping) and "ground_truth" in verl:
        return verl["ground_truth"]
    return sample.row.get("ground_truth", sample.row.get("answer"))


def _answered(sample: Sample) -> Any:
    """Return what follows the prompt: messages where the prompt is one, and every turn of an episode."""
    if sample.messages is not None:
        return list(sample.messages[sample.prompt_messages :])
    return [{"role": "assistant", "content": sample.completion}] if _is_conversation(sample) else sample.completion


def _is_conversation(sample: Sample) -> bool:
    prompt = sample.row.get("prompt")
    return isinstance(prompt, list) and bool(prompt) and all(isinstance(turn, Mapping) for turn in prompt)
