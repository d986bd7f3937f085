"""A reference or a teacher behind an endpoint. Every rank checks it before step 1, and asks for its own texts.

The endpoint's tokenizer and vocabulary are compared with those of the trained model, and the endpoint scores a text. It
scores that text again with each batch, so another model behind the address is noticed.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.config.sections.reference import ServerReferenceConfig
from holdfast.config.sections.server import ServerConfig
from holdfast.config.verbs.distill import ServerTeacherConfig
from holdfast.errors import ConfigError, ModelError, RunStopped
from holdfast.features.served_models.client import Client
from holdfast.http import EndpointRefuses, EndpointUnwell
from holdfast.text.shortening import shortened
from holdfast.training.other_models.reference import ServedModel
from holdfast.training.run import Model
from holdfast.training.setup.model import probe_logprobs

_TEXT = 'It was 12 + 30 = 42, said "Ann"; then\n\tfor item in list(range(7)): print(item)  # naïve, œuvre, 東京, done.'
"""A text with letters, digits, punctuation, blanks and multi-byte characters, on which tokenizers often differ."""
_PROBE_TOKENS = 64
_SPREAD = 31
"""Tokens from all over the vocabulary, besides its last one."""
_DRIFT = 0.1
"""Largest change in nats of what the endpoint says of one text in the course of a run, where no bound is set."""


@dataclass(frozen=True)
class Served(ServedModel):
    """A model behind an endpoint, with the tokenizer and the vocabulary of the trained model."""

    role: str
    """The name of its section: `reference` or `teacher`."""
    client: Client
    probe: tuple[int, ...]
    """Tokens of a text."""
    logprobs: NDArray[np.float64]
    """[L - 1], what the endpoint said before step 1 of the probe's tokens but the first"""
    drift: float
    """Largest allowed change of `logprobs`, in nats."""
    compared: bool
    """Whether its tokenizer was compared; it cannot be where the endpoint does not say which tokens a text has."""
    watches: bool
    """Whether this rank asks for the probe with every batch."""
    cache: dict[bytes, NDArray[np.float64]] | None = None
    """Log-probabilities of texts by their tokens; None disables the cache."""

    @property
    def name(self) -> str:
        """Return the name under which the model is served."""
        return self.client.model

    def remembering(self) -> Served:
        """Return the same model, which a rank asks for each text once; of a token 16 bytes are kept."""
        return replace(self, cache={})

    def told(self, texts: Sequence[NDArray[np.int64]]) -> list[NDArray[np.float64]]:
        """Return the log-probabilities of texts, [L] each, NaN for the first token.

        Raises:
            RunStopped: The endpoint does not answer, its answer cannot be used, or it is another model by now.
        """
        if self.cache is None:
            return self._told_now([text.tolist() for text in texts])
        keys = [text.tobytes() for text in texts]
        missing = {key: text.tolist() for key, text in zip(keys, texts, strict=True) if key not in self.cache}
        self.cache.update(zip(missing, self._told_now(list(missing.values())), strict=True))
        return [self.cache[key] for key in keys]

    def _told_now(self, texts: list[list[int]]) -> list[NDArray[np.float64]]:
        if not self.watches:
            return self._ask(texts)
        *logprobs, of_probe = self._ask([*texts, list(self.probe)])
        drift = float(np.abs(of_probe[1:] - self.logprobs).max())
        if drift > self.drift:
            raise RunStopped(
                f"The {self.role} at {self.client.section.url} is another model than it was before step 1: what it "
                f"says of one text differs by {drift:.2g} nats. Serve {self.name} as it was, and start the run again; "
                "it goes on from the last checkpoint."
            )
        return logprobs

    def _ask(self, texts: list[list[int]]) -> list[NDArray[np.float64]]:
        """Ask for several texts at a time; the first failure ends all of them."""
        section = self.client.section
        with ThreadPoolExecutor(section.requests, thread_name_prefix=f"holdfast-{self.role}") as threads:
            try:
                return list(threads.map(self.client.logprobs, texts))
            except BaseException as error:
                self.client.endpoint.given_up.set()  # or the pool would wait for retries of the other texts
                if isinstance(error, EndpointRefuses | EndpointUnwell):
                    raise RunStopped(
                        f"The {self.role} at {section.url} {error}. Mend the server; the same command then goes on "
                        "from the last checkpoint."
                    ) from error
                raise


def open_reference(policy: Model, section: ServerReferenceConfig, *, why: str) -> Served:
    """Return the reference policy behind an endpoint, compared with the policy; all ranks call this together.

    Args:
        policy: Freshly built: as it is at the start of the run.
        section: Where the endpoint is.
        why: What needs it, for the user.

    Raises:
        ConfigError: It cannot be reached, or does not serve what is asked for; the same on all ranks.
        ModelError: Its tokenizer, its vocabulary or its weights are not the policy's.
    """
    ranks = policy.run.ranks
    served = ranks.on_all_ranks(lambda: _connected(policy, section, "reference", section.bound))
    difference = max(ranks.gather(float(np.abs(_told_by(policy, served.probe) - served.logprobs).max())))
    if section.bound is not None and not difference <= section.bound:
        raise ModelError(
            f"reference: {served.name} at {section.url} is not the model at start: of one text their log-probabilities "
            f"differ by {difference:.2g} nats, and reference.bound is {section.bound:g}. Serve the weights of "
            "model.path; or set reference.bound: null if another reference is what you want, or a larger bound if its "
            "precision is lower."
        )
    if policy.run.world.is_first:
        note = "" if served.compared else "; its tokenizer could not be compared, since it named no tokens"
        print(
            f"reference policy: {served.name} at {section.url}, for {why}; of one text its log-probabilities differ "
            f"from the policy's by at most {difference:.1e} nats{note}",
            flush=True,
        )
    return served


def open_teacher(student: Model, section: ServerTeacherConfig) -> Served:
    """Return the teacher behind an endpoint; all ranks call this together.

    Raises:
        ConfigError: It cannot be reached, does not serve what is asked for, or does not give every token of the text a
            log-probability; the same on all ranks.
        ModelError: Its tokenizer or its vocabulary is not the student's, or it cannot be known to be.
    """
    ranks = student.run.ranks
    served = ranks.on_all_ranks(lambda: _connected(student, section, "teacher", None))
    # A reference would be seen to speak of other tokens by its numbers. Of another model no numbers are expected.
    if not all(ranks.gather(served.compared)):
        raise ModelError(
            f"teacher: {served.name} at {section.url} does not say which tokens it makes of a text, so they cannot be "
            "known to be the student's. Use a server that names tokens by their ids, as vLLM does "
            "(teacher.answers: prompt_logprobs), or a teacher in memory (teacher.kind: sharded)."
        )
    student_logprobs = _told_by(student, served.probe)
    if student.run.world.is_first:
        print(
            f"teacher: {served.name} at {section.url}, with the student's tokenizer; a token of one text takes it "
            f"{-served.logprobs.mean():.3g} nats, and the student {-student_logprobs.mean():.3g}. Evaluation sets tell "
            "the likelihoods of both, and no divergence.",
            flush=True,
        )
    return served


def _told_by(model: Model, probe: Sequence[int]) -> NDArray[np.float64]:
    """Return [L - 1], what the trained model says of the probe now; all ranks call this together."""
    return probe_logprobs(model.module, np.array(probe), model.run.world.device).cpu().double().numpy()


def _connected(model: Model, section: ServerConfig, role: str, bound: float | None) -> Served:
    """Return the endpoint's model, checked; one rank's part."""
    tokenizer, config = model.blueprint.tokenizer, model.run.config
    longest, size = config.data.max_length, int(model.blueprint.skeleton.config.get_text_config().vocab_size)
    if not config.samples:  # a model samples also tokens that no text has
        size = min(size, len(tokenizer))
    client = Client.of(section, role)
    try:
        client = replace(client, model=_served_name(dict(client.models()), longest, section, role))
        compared = tokenizer_is_compared(client, tokenizer, role)
        probe = tuple(tokenizer.encode(_TEXT, add_special_tokens=False))[:_PROBE_TOKENS][:longest]
        logprobs = client.logprobs(probe)[1:]
        _check_vocabulary(client, size, longest, role)
    except (EndpointRefuses, EndpointUnwell) as error:
        raise ConfigError(
            f"{role}.url: {section.url} {error}. See that the server runs, and that it is vLLM or answers like it "
            f"({role}.answers)."
        ) from error
    return Served(role, client, probe, logprobs, bound or _DRIFT, compared, model.run.world.is_first)


def _served_name(contexts: dict[str, int | None], longest: int, section: ServerConfig, role: str) -> str:
    """Return the served model that the section means.

    Raises:
        ConfigError: It is not served, or its context is too short.
    """
    name = section.model or (next(iter(contexts)) if len(contexts) == 1 else "")
    if name not in contexts:
        problem = f"no {name} is served there" if name else "several models are served there"
        served = ", ".join(contexts) or "none"
        raise ConfigError(f"{role}.model: {problem}; {section.url} serves {served}. Name one of them.")
    context = contexts[name]
    if context is not None and context <= longest:  # one token more is made of each
        raise ConfigError(
            f"{role}: {name} at {section.url} takes {context - 1} tokens, and data.max_length is {longest}. Start the "
            f"server with a context of {longest + 1} (vLLM: --max-model-len {longest + 1})."
        )
    return name


def tokenizer_is_compared(client: Client, tokenizer: Any, role: str) -> bool:
    """Compare the tokens of a text, and of words from all over the vocabulary; return whether any were.

    Raises:
        ModelError: The endpoint makes other tokens of a text than the tokenizer.
    """
    compared = False
    for text in (_TEXT, tokenizer.decode(_spread(len(tokenizer)), skip_special_tokens=True)):
        ours = tokenizer.encode(text, add_special_tokens=False)
        theirs = client.tokens_of(text) if len(ours) > 1 else []
        if all(token is None for token in theirs):
            continue
        if len(ours) != len(theirs) or any(there not in {None, here} for here, there in zip(ours, theirs, strict=True)):
            raise ModelError(
                f"{role}: {client.model} at {client.section.url} has another tokenizer than the trained model: of "
                f"{shortened(text, 40)!r} it makes {len(theirs)} tokens ({_first(theirs)}), the trained model "
                f"{len(ours)} ({_first(ours)}). Serve a model with the trained model's tokenizer."
            )
        compared = True
    return compared


def _first(tokens: Sequence[int | None]) -> str:
    return ", ".join("?" if token is None else str(token) for token in tokens[:6])


def _check_vocabulary(client: Client, size: int, longest: int, role: str) -> None:
    """Check that the endpoint knows the last token of the vocabulary and others spread over it.

    Raises:
        ModelError: The endpoint refuses these tokens.
    """
    try:
        client.logprobs([*_spread(size)[: max(1, longest - 1)], size - 1])
    except EndpointRefuses as error:
        raise ModelError(
            f"{role}: {client.model} at {client.section.url} does not know all {size} tokens that the trained model "
            f"may use: sent token {size - 1}, it {error}. Serve a model with the trained model's vocabulary."
        ) from error


def _spread(size: int) -> list[int]:
    return [number * 7919 % size for number in range(1, _SPREAD + 1)]
