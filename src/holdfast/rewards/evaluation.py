"""Call a bound reward function for samples: one after the other, in one call, or side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from holdfast.processes.user_code import seed_generators
from holdfast.rewards.base import Sample, SampleOutcome, outcome_of, outcomes_of
from holdfast.rewards.functions.signatures import BatchedCall, Bound, ConcurrentCall, One, PerSampleCall, event_loop

Tell = Callable[[int, SampleOutcome | None], None]


def evaluate(
    bound: Bound,
    name: str,
    samples: Mapping[int, Sample],
    tell: Tell,
    failed: Callable[[BaseException], SampleOutcome],
    faults: type[BaseException] | tuple[type[BaseException], ...],
) -> None:
    """Tell the outcome of each sample as soon as it is there.

    Args:
        bound: The function.
        name: Of the reward; with the samples it seeds what draws numbers.
        samples: By their places.
        tell: Takes a place and its outcome; None for samples of a batch that raised: one bad sample fails the call for
            all of them, so each is to be asked for alone.
        failed: Makes the outcome of an exception.
        faults: Exceptions that are the function's.
    """
    if not samples:
        return
    match bound:
        case PerSampleCall(call):
            for place, sample in samples.items():
                _seed(name, sample)
                try:
                    outcome = outcome_of(call(sample))
                except faults as error:  # the border to a user's function
                    outcome = failed(error)
                tell(place, outcome)
        case BatchedCall(call):
            _seed(name, next(iter(samples.values())))
            outcomes: list[SampleOutcome | None]
            try:
                outcomes = [*outcomes_of(call(list(samples.values())), len(samples))]
            except faults as error:
                outcomes = [failed(error)] if len(samples) == 1 else [None] * len(samples)
            for place, each in zip(samples, outcomes, strict=True):
                tell(place, each)
        case ConcurrentCall(call):
            _seed(name, next(iter(samples.values())))
            _evaluate_side_by_side(call, samples, tell, failed, faults)


def _evaluate_side_by_side(
    call: One,
    samples: Mapping[int, Sample],
    tell: Tell,
    failed: Callable[[BaseException], SampleOutcome],
    faults: type[BaseException] | tuple[type[BaseException], ...],
) -> None:
    import asyncio  # a worker whose rewards are plain functions never needs it

    async def one(place: int, sample: Sample) -> None:
        try:
            outcome = outcome_of(await call(sample))
        except faults as error:
            outcome = failed(error)
        tell(place, outcome)

    async def together() -> None:
        await asyncio.gather(*(one(place, sample) for place, sample in samples.items()))

    event_loop().run_until_complete(together())


def _seed(name: str, sample: Sample) -> None:
    seed_generators(f"{name}:{sample.sample_id}", sample.sample_id)
