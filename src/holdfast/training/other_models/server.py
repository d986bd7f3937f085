"""A model behind an endpoint that scores tokens; every rank sends its own samples and checks the answers.

Before step 1, the endpoint's tokenizer is compared with that of the trained model, and the endpoint scores a text. A
failure during a run raises the same error on all ranks, after the last complete step.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from holdfast.config.sections.server import ServerConfig
from holdfast.data.batches.packing import places, to_device
from holdfast.errors import ConfigError, ModelError, RunStopped
from holdfast.http import EndpointRefuses, EndpointUnwell
from holdfast.parallel.collectives import RankGroup
from holdfast.text.shortening import shortened
from holdfast.training.other_models.endpoint import CompletionServer, ServedModel
from holdfast.training.run import Model
from holdfast.training.setup.model import probe_logprobs
from holdfast.types import Batch, MiniBatch, host_value

_TEXT = 'It was 12 + 30 = 42, said "Ann"; then\n\tfor item in list(range(7)): print(item)  # naïve, œuvre, 東京, done.'
"""A text with letters, digits, punctuation, blanks and multi-byte characters, on which tokenizers often differ."""
_PROBE_TOKENS = 64
_SPREAD = 31
"""Tokens from all over the vocabulary, besides its last one."""
_DRIFT = 0.1
"""Largest change in nats of what the endpoint says of one text in the course of a run, where no bound is set."""


class Role(NamedTuple):
    """What a served model is used for, in words for messages: the configuration section and the trained model."""

    section: str
    """Its name in the configuration."""
    title: str
    trained: str
    """The model that is trained, and whose tokens it must have."""


@dataclass(frozen=True)
class Probe:
    """A text and the log-probabilities that the endpoint gave for it before step 1, to detect later changes."""

    tokens: tuple[int, ...]
    logprobs: NDArray[np.float64]
    """[L - 1], of all tokens but the first"""

    def told_by(self, model: Model) -> NDArray[np.float64]:
        """Return [L - 1], what the model that is trained says of it now; all ranks call this together."""
        return probe_logprobs(model.module, np.array(self.tokens), model.run.world.device).cpu().double().numpy()


@dataclass(frozen=True)
class ScoringServer:
    """A model behind an endpoint whose tokenizer was checked before step 1."""

    role: Role
    server: CompletionServer
    ranks: RankGroup
    device: torch.device
    probe: Probe
    drift: float
    """Largest allowed change of the probe's log-probabilities, in nats."""
    cache: dict[bytes, NDArray[np.float64]] | None = None
    """Log-probabilities of sequences by hash of their tokens; None disables the cache."""

    def remembering(self) -> ScoringServer:
        """Return the same endpoint, which a rank asks for each sequence once; of a token 8 bytes are kept."""
        return replace(self, cache={})

    def scored(self, mini_batch: MiniBatch, name: str) -> MiniBatch:
        """Add its log-probabilities to every trained token as a column; all ranks call this together.

        Raises:
            RunStopped: The endpoint does not answer, or what it answers cannot be used; the same on all ranks.
        """
        batches = [to_device(batch, self.device) for batch in mini_batch.micro_batches]
        columns = self.ranks.on_all_ranks(lambda: self._columns(batches))
        return replace(
            mini_batch,
            micro_batches=tuple(
                replace(batch, per_token={**batch.per_token, name: column.to(self.device)})
                for batch, column in zip(batches, columns, strict=True)
            ),
        )

    def _columns(self, batches: Sequence[Batch]) -> list[torch.Tensor]:
        """Return [B, T] for every batch, 0 where nothing is trained."""
        requests: list[tuple[int, int, Any, list[int], NDArray[np.bool_]]] = []
        for number, batch in enumerate(batches):
            tokens, trained = (
                torch.from_numpy(host_value(tensor, "tokens for a server"))
                for tensor in (batch.tokens, batch.loss_mask)
            )
            for row, span in places(batch):
                mask = trained[row, span].numpy()
                length = int(np.flatnonzero(mask)[-1]) + 1 if mask.any() else 0
                if length:
                    requests.append((number, row, span, tokens[row, span].tolist()[:length], mask))
        logprobs = self._logprobs_of([tokens for _, _, _, tokens, _ in requests])
        columns = [torch.zeros(batch.tokens.shape, dtype=batch.weights.dtype) for batch in batches]
        for (number, row, span, tokens_, mask), values in zip(requests, logprobs, strict=True):
            row_values = np.zeros(mask.size)
            row_values[: len(tokens_)] = np.where(mask[: len(tokens_)], values, 0.0)
            columns[number][row, span] = torch.from_numpy(row_values).to(columns[number].dtype)
        return columns

    def _logprobs_of(self, texts: Sequence[list[int]]) -> list[NDArray[np.float64]]:
        """Return the log-probabilities of sequences; ask only for those that are not in the cache."""
        if self.cache is None:
            return self._answered_now(texts)
        keys = [xxhash.xxh3_128_digest(np.array(tokens, np.int64).tobytes()) for tokens in texts]
        missing = {key: tokens for key, tokens in zip(keys, texts, strict=True) if key not in self.cache}
        self.cache.update(zip(missing, self._answered_now(list(missing.values())), strict=True))
        return [self.cache[key] for key in keys]

    def _answered_now(self, texts: Sequence[list[int]]) -> list[NDArray[np.float64]]:
        """Ask for sequences, and see that the model is still the same, whichever rank has the texts of a batch."""
        if self.ranks.rank != 0:
            return self._ask(texts)
        *logprobs, of_probe = self._ask([*texts, list(self.probe.tokens)])
        drift = float(np.abs(of_probe[1:] - self.probe.logprobs).max())
        if drift > self.drift:
            raise RunStopped(
                f"The {self.role.title} at {self.server.section.url} is another model than it was before step 1: "
                f"what it says of one text differs by {drift:.2g} nats. Serve {self.server.model} as it was, and start "
                "the run again; it goes on from the last checkpoint."
            )
        return logprobs

    def _ask(self, texts: Sequence[list[int]]) -> list[NDArray[np.float64]]:
        """Return the log-probabilities of sequences, several at a time; the first failure ends all of them."""
        section = self.server.section
        with ThreadPoolExecutor(section.requests, thread_name_prefix=f"holdfast-{self.role.section}") as threads:
            waiting = [threads.submit(self.server.logprobs, tokens) for tokens in texts]
            try:
                return [future.result() for future in waiting]
            except (EndpointRefuses, EndpointUnwell) as error:
                raise RunStopped(
                    f"The {self.role.title} at {section.url} {error}. Mend the server; the same command then goes on "
                    "from the last checkpoint."
                ) from error
            finally:
                self.server.endpoint.given_up.set()
                for future in waiting:
                    future.cancel()
                threads.shutdown()
                self.server.endpoint.given_up.clear()


class ConnectedServer(NamedTuple):
    """A scoring server that was checked before step 1."""

    server: ScoringServer
    compared: bool
    """Whether its tokenizer was compared; it cannot be where the endpoint does not say which tokens a text has."""


def meet(
    model: Model, section: ServerConfig, role: Role, *, samples: bool, drift: float | None = None
) -> ConnectedServer:
    """Return the model behind an endpoint, with the tokens of the trained one; all ranks call this together.

    Args:
        model: Freshly built.
        section: Where the endpoint is.
        role: What is expected there.
        samples: Whether it is asked for texts that the trained model writes: that may have tokens which no text has.
        drift: Largest change in nats of what it says of one text in the course of the run; default: 0.1.

    Raises:
        ConfigError: It cannot be reached, does not serve what is asked for, or does not score a text; the same on all
            ranks.
        ModelError: Its tokenizer or its vocabulary is not that of the trained model.
    """
    return model.run.ranks.on_all_ranks(
        lambda: _connected(model, section, role, _vocabulary(model, samples=samples), drift or _DRIFT)
    )


def _connected(trained: Model, section: ServerConfig, role: Role, size: int, drift: float) -> ConnectedServer:
    """Return the endpoint with its model chosen and checked; one rank's part of `meet`."""
    tokenizer, longest = trained.blueprint.tokenizer, trained.run.config.data.max_length
    server = CompletionServer.of(section, role.section)
    try:
        offered = server.models()
        server = server.named(_served_name(offered, section, role))
        _check_length(next(model for model in offered if model.name == server.model), longest, section, role)
        compared = _check_tokenizer(server, tokenizer, role)
        tokens = tuple(tokenizer.encode(_TEXT, add_special_tokens=False))[:_PROBE_TOKENS][:longest]
        probe = Probe(tokens, server.logprobs(tokens)[1:])
        _check_vocabulary(server, size, longest, role)
    except (EndpointRefuses, EndpointUnwell) as error:
        raise ConfigError(
            f"{role.section}.url: {section.url} {error}. See that the server runs, and that it is vLLM or answers like "
            f"it ({role.section}.answers)."
        ) from error
    return ConnectedServer(
        ScoringServer(role, server, trained.run.ranks, trained.run.world.device, probe, drift), compared
    )


def _served_name(offered: Sequence[ServedModel], section: ServerConfig, role: Role) -> str:
    names = [model.name for model in offered]
    if section.model is None and len(names) == 1:
        return names[0]
    if section.model in names:
        return str(section.model)
    problem = "several models are served there" if section.model is None else f"no {section.model} is served there"
    served = ", ".join(names) or "none"
    raise ConfigError(f"{role.section}.model: {problem}; {section.url} serves {served}. Name one of them.")


def _check_length(model: ServedModel, longest: int, section: ServerConfig, role: Role) -> None:
    if model.longest is not None and model.longest <= longest:  # one token more is made of each
        raise ConfigError(
            f"{role.section}: {model.name} at {section.url} takes {model.longest - 1} tokens, and data.max_length is "
            f"{longest}. Start the server with a context of {longest + 1} (vLLM: --max-model-len {longest + 1})."
        )


def _check_tokenizer(server: CompletionServer, tokenizer: Any, role: Role) -> bool:
    """Compare the tokens of a text, and of words from all over the vocabulary; return whether any were.

    Raises:
        ModelError: The endpoint makes other tokens of a text than the tokenizer.
    """
    compared = False
    for text in (_TEXT, tokenizer.decode(_spread(len(tokenizer)), skip_special_tokens=True)):
        ours = tokenizer.encode(text, add_special_tokens=False)
        if len(ours) < 2:
            continue
        theirs = server.tokens_of(text)
        if all(token is None for token in theirs):
            continue
        same = len(ours) == len(theirs) and all(
            served_token in {None, token} for token, served_token in zip(ours, theirs, strict=True)
        )
        if not same:
            raise ModelError(
                f"{role.section}: {server.model} at {server.section.url} has another tokenizer than the "
                f"{role.trained}: of {shortened(text, 40)!r} it makes {len(theirs)} tokens ({_first(theirs)}), the "
                f"{role.trained} {len(ours)} ({_first(ours)}). Serve a model with the {role.trained}'s tokenizer."
            )
        compared = True
    return compared


def _first(tokens: Sequence[int | None]) -> str:
    return ", ".join("?" if token is None else str(token) for token in tokens[:6])


def _vocabulary(model: Model, *, samples: bool) -> int:
    """Return how many tokens an endpoint may be asked for: a model samples also those that no text has."""
    vocabulary_size = int(model.blueprint.skeleton.config.get_text_config().vocab_size)
    return vocabulary_size if samples else min(vocabulary_size, len(model.blueprint.tokenizer))


def _check_vocabulary(server: CompletionServer, size: int, longest: int, role: Role) -> None:
    """Check that the endpoint knows the last token of the vocabulary and others spread over it.

    Raises:
        ModelError: The endpoint refuses these tokens.
    """
    tokens = [*_spread(size)[: max(1, longest - 1)], size - 1]
    try:
        server.logprobs(tokens)
    except EndpointRefuses as error:
        raise ModelError(
            f"{role.section}: {server.model} at {server.section.url} does not know all {size} tokens that the "
            f"{role.trained} may use: sent token {size - 1}, it {error}. Serve a model with the {role.trained}'s "
            "vocabulary."
        ) from error


def _spread(size: int) -> list[int]:
    return [number * 7919 % size for number in range(1, _SPREAD + 1)]
