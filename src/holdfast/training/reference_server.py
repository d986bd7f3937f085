"""The reference policy behind an endpoint: every rank asks for its own samples, and what it is told is checked.

Before step 1 it is seen that the endpoint has the policy's tokens and, where it is to have the policy's weights, its
log-probabilities. In the middle of a run a failure is one error on all ranks, behind the last whole step.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from holdfast.config.grpo import GRPOConfig
from holdfast.config.reference import ServerReferenceConfig
from holdfast.data.packing import places, to_device
from holdfast.errors import ConfigError, ModelError, RunStopped
from holdfast.parallel.collectives import ProcessExchange
from holdfast.training.completion_server import CompletionServer, ServedModel, ServerRefuses, ServerUnwell
from holdfast.training.probe import probe_logprobs
from holdfast.training.run import Evaluation
from holdfast.types import Batch, MiniBatch

_TEXT = 'It was 12 + 30 = 42, said "Ann"; then\n\tfor item in list(range(7)): print(item)  # naïve, œuvre, 東京, done.'
"""Letters, digits, signs, blanks, and characters of several bytes: where tokenizers differ first."""
NO_IMAGES = "reference.kind: server sends tokens, and no images; use sharded"
"""Why no row may have images."""
_PROBE_TOKENS = 64
_SPREAD = 31
"""Tokens from all over the vocabulary, besides its last one."""
_DRIFT = 0.1
"""Largest change in nats of what the endpoint says of one text in the course of a run, where no bound is set."""


@dataclass(frozen=True)
class _Probe:
    """A text, and what the endpoint said of it before step 1."""

    tokens: tuple[int, ...]
    logprobs: NDArray[np.float64]
    """[L - 1], of all tokens but the first"""


@dataclass(frozen=True)
class ServerReference:
    """The reference policy behind an endpoint."""

    server: CompletionServer
    exchange: ProcessExchange
    device: torch.device
    probe: _Probe

    def scored(self, mini_batch: MiniBatch, name: str) -> MiniBatch:
        """Add its log-probabilities to every trained token as a column; all ranks call this together.

        Raises:
            RunStopped: The endpoint does not answer, or what it answers cannot be used; the same on all ranks.
        """
        batches = [to_device(batch, self.device) for batch in mini_batch.micro_batches]
        columns: list[torch.Tensor] = []
        with self.exchange.together():
            columns += self._columns(batches)
        return replace(
            mini_batch,
            micro_batches=tuple(
                replace(batch, per_token={**batch.per_token, name: column.to(self.device)})
                for batch, column in zip(batches, columns, strict=True)
            ),
        )

    def _columns(self, batches: Sequence[Batch]) -> list[torch.Tensor]:
        """Return [B, T] for every batch, 0 where nothing is trained."""
        asked: list[tuple[int, int, Any, list[int], NDArray[np.bool_]]] = []
        for number, batch in enumerate(batches):
            tokens, trained = batch.tokens.cpu(), batch.loss_mask.cpu()
            for row, place in places(batch):
                mask = trained[row, place].numpy()
                length = int(np.flatnonzero(mask)[-1]) + 1 if mask.any() else 0
                if length:
                    asked.append((number, row, place, tokens[row, place].tolist()[:length], mask))
        texts = [tokens for _, _, _, tokens, _ in asked]
        if self.exchange.rank == 0 and texts:
            texts.append(list(self.probe.tokens))
        told = self._ask(texts)
        if len(told) > len(asked):
            self._check_drift(told[-1])
        columns = [torch.zeros(batch.tokens.shape, dtype=batch.weights.dtype) for batch in batches]
        for (number, row, place, tokens_, mask), values in zip(asked, told, strict=False):
            own = np.zeros(mask.size)
            own[: len(tokens_)] = np.where(mask[: len(tokens_)], values, 0.0)
            columns[number][row, place] = torch.from_numpy(own).to(columns[number].dtype)
        return columns

    def _ask(self, texts: Sequence[list[int]]) -> list[NDArray[np.float64]]:
        """Return the log-probabilities of sequences, several at a time; the first failure ends all of them."""
        section = self.server.section
        with ThreadPoolExecutor(section.requests, thread_name_prefix="holdfast-reference") as threads:
            waiting = [threads.submit(self.server.logprobs, tokens) for tokens in texts]
            try:
                return [future.result() for future in waiting]
            except (ServerRefuses, ServerUnwell) as error:
                raise RunStopped(
                    f"The reference policy at {section.url} {error}. Mend the server; the same command then goes on "
                    "from the last checkpoint."
                ) from error
            finally:
                self.server.given_up.set()
                for future in waiting:
                    future.cancel()
                threads.shutdown()
                self.server.given_up.clear()

    def _check_drift(self, logprobs: NDArray[np.float64]) -> None:
        drift = float(np.abs(logprobs[1:] - self.probe.logprobs).max())
        if drift > (self.server.section.bound or _DRIFT):
            raise RunStopped(
                f"The reference policy at {self.server.section.url} is another model than it was before step 1: "
                f"what it says of one text differs by {drift:.2g} nats. Serve {self.server.model} as it was, and start "
                "the run again; it goes on from the last checkpoint."
            )


def connect(policy: Evaluation, section: ServerReferenceConfig, *, why: str) -> ServerReference:
    """Return the reference policy behind an endpoint, compared with the policy; all ranks call this together.

    Args:
        policy: Freshly built: as it is at the start of the run.
        section: Where the endpoint is.
        why: What needs it, for the user.

    Raises:
        ConfigError: It cannot be reached, or does not serve what is asked for; the same on all ranks.
        ModelError: Its tokenizer, its vocabulary or its weights are not the policy's.
    """
    exchange = policy.exchange
    found: list[tuple[CompletionServer, _Probe, str]] = []
    with exchange.together():
        found.append(_met(policy, section))
    server, probe, note = found[0]
    said = probe_logprobs(policy.policy, np.array(probe.tokens), policy.world.device).cpu().double().numpy()
    difference = max(exchange.gather(float(np.abs(said - probe.logprobs).max())))
    if section.bound is not None and not difference <= section.bound:
        raise ModelError(
            f"reference: {server.model} at {section.url} is not the model at start: of one text their "
            f"log-probabilities differ by {difference:.2g} nats, and reference.bound is {section.bound:g}. Serve the "
            "weights of model.path; or set reference.bound: null if another reference is what you want, or a larger "
            "bound if its precision is lower."
        )
    if policy.world.is_first:
        print(
            f"reference policy: {server.model} at {section.url}, for {why}; of one text its log-probabilities differ "
            f"from the policy's by at most {difference:.1e} nats{note}",
            flush=True,
        )
    return ServerReference(server, exchange, policy.world.device, probe)


def _met(policy: Evaluation, section: ServerReferenceConfig) -> tuple[CompletionServer, _Probe, str]:
    """Return the endpoint with its model chosen, what it says of a text, and a note; one rank's part of `connect`."""
    server = CompletionServer.of(section)
    try:
        offered = server.models()
        server = server.named(_chosen(offered, section))
        _check_length(next(model for model in offered if model.name == server.model), policy, section)
        note = _check_tokenizer(server, policy.origin.tokenizer)
        tokens = tuple(policy.origin.tokenizer.encode(_TEXT, add_special_tokens=False))[:_PROBE_TOKENS]
        tokens = tokens[: policy.config.data.max_length]
        probe = _Probe(tokens, server.logprobs(tokens)[1:])
        _check_vocabulary(server, _vocabulary(policy), policy.config.data.max_length)
    except (ServerRefuses, ServerUnwell) as error:
        raise ConfigError(
            f"reference: {section.url} {error}. See that the server runs, and that it is vLLM or answers like it "
            "(reference.answers)."
        ) from error
    return server, probe, note


def _chosen(offered: Sequence[ServedModel], section: ServerReferenceConfig) -> str:
    names = [model.name for model in offered]
    if section.model is None and len(names) == 1:
        return names[0]
    if section.model in names:
        return str(section.model)
    asked = "several models are served there" if section.model is None else f"no {section.model} is served there"
    raise ConfigError(f"reference.model: {asked}; {section.url} serves {', '.join(names) or 'none'}. Name one of them.")


def _check_length(model: ServedModel, policy: Evaluation, section: ServerReferenceConfig) -> None:
    longest = policy.config.data.max_length
    if model.longest is not None and model.longest <= longest:  # one token more is made of each
        raise ConfigError(
            f"reference: {model.name} at {section.url} takes {model.longest - 1} tokens, and data.max_length is "
            f"{longest}. Start the server with a context of {longest + 1} (vLLM: --max-model-len {longest + 1})."
        )


def _check_tokenizer(server: CompletionServer, tokenizer: Any) -> str:
    """Compare the tokens of a text, and of words from all over the vocabulary; return a note where they are not told.

    Raises:
        ModelError: They differ.
    """
    for text in (_TEXT, tokenizer.decode(_spread(len(tokenizer)), skip_special_tokens=True)):
        ours = tokenizer.encode(text, add_special_tokens=False)
        if len(ours) < 2:
            continue
        theirs = server.tokens_of(text)
        if not any(token is not None for token in theirs):
            return "; it names no tokens, so its tokenizer could not be compared"
        same = len(ours) == len(theirs) and all(
            named in {None, token} for token, named in zip(ours, theirs, strict=True)
        )
        if not same:
            raise ModelError(
                f"reference: {server.model} at {server.section.url} has another tokenizer than the policy: of "
                f"{text[:40]!r} it makes {len(theirs)} tokens ({_first(theirs)}), the policy {len(ours)} "
                f"({_first(ours)}). Serve a model with the policy's tokenizer."
            )
    return ""


def _first(tokens: Sequence[int | None]) -> str:
    return ", ".join("?" if token is None else str(token) for token in tokens[:6])


def _vocabulary(policy: Evaluation) -> int:
    """Return how many tokens the reference may be asked for: a policy samples also those that no text has."""
    sampled = isinstance(policy.config, GRPOConfig)
    known = int(policy.origin.skeleton.config.get_text_config().vocab_size)
    return known if sampled else min(known, len(policy.origin.tokenizer))


def _check_vocabulary(server: CompletionServer, size: int, longest: int) -> None:
    """See that the endpoint knows the policy's last token, and others from all over its vocabulary.

    Raises:
        ModelError: It refuses them.
    """
    tokens = [*_spread(size)[: max(1, longest - 1)], size - 1]
    try:
        server.logprobs(tokens)
    except ServerRefuses as error:
        raise ModelError(
            f"reference: {server.model} at {server.section.url} does not know all {size} tokens that the "
            f"policy may use: sent token {size - 1}, it {error}. Serve a model with the policy's vocabulary."
        ) from error


def _spread(size: int) -> list[int]:
    return [number * 7919 % size for number in range(1, _SPREAD + 1)]
