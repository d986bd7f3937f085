"""The sharded root: takes a batch, returns scores or a loss.

Backbone and head are called nowhere else. FSDP2 gathers a root's own parameters only inside the root's forward; a head
touched outside it finds shards where it expects a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from holdfast.data.content.model_inputs import tensor_arguments
from holdfast.errors import ModelError
from holdfast.models.chunks.logits import HeadWeights
from holdfast.models.heads import spans, towers
from holdfast.models.heads.noise import EmbeddingNoise
from holdfast.models.layers.attention import cache_of
from holdfast.models.layers.exchange import RowExchange
from holdfast.models.layers.family import Family, HeadSpec, backbone_of, output_layer_of, reader_of
from holdfast.models.layers.rotary import read_rows_alone
from holdfast.models.layers.routers import RouterLoss, RouterOutput, Routers, routers_of
from holdfast.models.names import POLICY_MODULE
from holdfast.models.scores import score, separable_loss
from holdfast.objectives.base import Objective, ratio, scored_tokens
from holdfast.objectives.supervised import NegativeLogLikelihood
from holdfast.types import Batch, LossSum, Scores

Made = TypeVar("Made")
UseOfHead = Callable[[Tensor, HeadWeights], Made]


def _read_or_multiply(
    layer: Any, forward: Callable[..., Any], hidden: Tensor, use: UseOfHead[Any] | None = None, *, again: bool = True
) -> Any:
    """Stand in for a layer's `forward`, so that whatever gathers parameters for a call of it does so for our loss too.

    Args:
        layer: Of logits.
        forward: Its own, which is meant where `use` is None.
        hidden: [N, H]
        use: Of hidden states and the layer's parameters.
        again: Whether the backward pass reads the parameters; for `parallel/apply.py`.
    """
    del again
    return forward(hidden) if use is None else use(hidden, HeadWeights(layer.weight, getattr(layer, "bias", None)))


RAMP = 64.0
"""Largest number that is sent through a model's head to see what becomes of it."""


class HeadProbe(NamedTuple):
    """What a model's own head made of one sequence, whose last token's logits were replaced by a ramp."""

    logits: Tensor
    """[L - 1, V] of the other tokens."""
    hidden: Tensor
    """[H], the last token's hidden state as the backbone returned it."""
    entered: Tensor
    """[H], the same as the output layer got it: some models scale it between."""
    sent: Tensor
    """[W], the ramp in the place of what the output layer gave."""
    returned: Tensor
    """[V], the logits that the model made of the ramp."""
    biased: bool
    """Whether the output layer adds a bias, which a scale before it does not reach."""


class PolicyModel(nn.Module):
    """A transformers language model as a policy over tokens.

    Args:
        language_model: The transformers model.
        family: Its particulars.
        head_spec: How its logits follow from hidden states.
        padded: Batches hold one document per row, and attention is transformers' own.
        router_loss: What is added to an objective's loss in training; only for a model with routers.
    """

    def __init__(
        self,
        language_model: nn.Module,
        family: Family,
        head_spec: HeadSpec,
        *,
        padded: bool = False,
        router_loss: RouterLoss | None = None,
    ) -> None:
        super().__init__()
        self.add_module(POLICY_MODULE, language_model)
        self.family = family
        self.head_spec = head_spec
        self.padded = padded
        self.routers = Routers(language_model) if routers_of(language_model) else None
        self.router_loss = router_loss
        read_rows_alone(language_model)
        self.noise: EmbeddingNoise | None = None
        self.context: RowExchange | None = None
        if (head := self.readable_head()) is not None:
            head.forward = partial(_read_or_multiply, head, head.forward)

    def readable_head(self) -> nn.Module | None:
        """Return the layer whose parameters a loss reads in a call of it; None where there is none."""
        layer: Any = self.language_model.get_output_embeddings()  # type: ignore[operator]  # transformers' method
        return layer if isinstance(layer, nn.Module) else None

    @property
    def language_model(self) -> nn.Module:
        """Return the transformers model."""
        return self.get_submodule(POLICY_MODULE)

    @contextmanager
    def noisy(self, alpha: float, *, seed: int, step: int) -> Iterator[None]:
        """Add noise to the embeddings of every batch within the block; outside of such a block there never is any."""
        self.noise = EmbeddingNoise(self.language_model.get_input_embeddings(), alpha, seed, step)  # type: ignore[operator]
        try:
            yield
            self.noise.end()
        finally:
            self.noise.close()
            self.noise = None

    def forward(
        self,
        batch: Batch,
        objective: Objective | None = None,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> LossSum | Scores:
        """Score the batch's trained tokens; with an objective, sum its loss over them.

        Args:
            batch: On the model's device.
            objective: The loss, or None for differentiable scores.
            temperature: Divides the logits.
            entropy: Also compute entropies, even if the objective does not need them.
        """
        if objective is None or self.routers is None or not self.training:
            hidden = self.hidden_states(batch)
            return self._scored(hidden, batch, objective, temperature, entropy)
        with self.routers.watched() as router_outputs:
            hidden = self.hidden_states(batch)
        output = self._scored(hidden, batch, objective, temperature, entropy)
        assert isinstance(output, LossSum)
        return self._with_routers(output, router_outputs, batch)

    def _scored(
        self, hidden: Tensor, batch: Batch, objective: Objective | None, temperature: float, entropy: bool
    ) -> LossSum | Scores:
        predicted = hidden.flatten(0, 1).index_select(0, spans.predictors(batch))
        targets = batch.tokens.flatten()[spans.scored_here(batch)]
        spec, entropy = self.head_spec, entropy or (objective is not None and objective.needs_entropy)
        scored = partial(score, targets=targets, spec=spec, temperature=temperature, entropy=entropy)
        if objective is None:
            return spans.scores_of_all(self._with_head(predicted, scored, again=True), batch, self.context)
        tokens = scored_tokens(batch)
        loss: Tensor
        if objective.separable:
            local_tokens = spans.tokens_here(tokens, batch)

            def terms(logprobs: Tensor, entropies: Tensor | None, start: int, end: int) -> Tensor:
                chunk = local_tokens.part(start, end)
                return objective.token_terms(logprobs, entropies, chunk) * chunk.weights.to(logprobs.dtype)

            # A loss of the user's own that has such a number smooths by itself.
            share = objective.label_smoothing if isinstance(objective, NegativeLogLikelihood) else 0.0
            summed = partial(
                separable_loss,
                targets=targets,
                terms=terms,
                spec=spec,
                temperature=temperature,
                entropy=entropy,
                label_smoothing=share,
            )
            loss, scores = self._with_head(predicted, summed, again=False)
            scores = spans.scores_of_all(scores, batch, self.context)
        else:
            live = spans.scores_of_all(self._with_head(predicted, scored, again=True), batch, self.context)
            terms_all = objective.token_terms(live.logprobs, live.entropy, tokens)
            loss = spans.first_ranks_loss((terms_all * tokens.weights.to(live.logprobs.dtype)).sum(), batch)
            scores = Scores(*(None if values is None else values.detach() for values in live))  # type: ignore[arg-type]
        return LossSum(loss, scores, spans.counted_once(objective.sums(scores, tokens), batch))

    def _with_routers(self, output: LossSum, router_outputs: list[RouterOutput], batch: Batch) -> LossSum:
        assert self.routers is not None
        tally = self.routers.tally(router_outputs, batch)
        if self.router_loss is None:
            return output._replace(router_loads=tally.loads)
        balance = tally.of_row(batch, self.context).loss(self.router_loss.kind, batch)
        loss = output.loss + self.router_loss.coefficient * balance.to(output.loss.dtype)
        return output._replace(
            loss=loss,
            sums=output.sums | {"router/loss": ratio(balance, batch.count)},
            router_loads=tally.loads,
        )

    @torch.no_grad()
    def predicting_states(self, batch: Batch) -> Tensor:
        """Return the hidden states [N, H] that predict the scored tokens, whatever stands behind them."""
        return self.hidden_states(batch).flatten(0, 1).index_select(0, spans.predictors(batch))

    @torch.no_grad()
    def show_predictors(self, batch: Batch, look: Callable[[Tensor, HeadWeights], None]) -> None:
        """Call `look` with the hidden states [N, H] that predict the scored tokens, and the head; keep nothing.

        Like `forward`, a method that finds the root's parameters gathered; they are so while `look` runs.
        """
        hidden = self.hidden_states(batch).flatten(0, 1)
        self._with_head(hidden.index_select(0, spans.predictors(batch)), look, again=True)

    def hidden_states(self, batch: Batch) -> Tensor:
        """Return the backbone's last hidden states, [B, T, H]; only inside this module's forward."""
        start, end = batch.span or (0, batch.tokens.shape[1])
        inputs: dict[str, Any] = {"input_ids": batch.tokens[:, start:end]}
        tower: AbstractContextManager[None] = nullcontext()
        if self.noise is not None:
            self.noise.follow(batch)
        if batch.stands_in:
            tower = towers.idle_tower(self._backbone, batch)
        elif batch.model_inputs:
            inputs, tower = self._image_inputs(batch, start, end)
        if self.padded:
            visible = batch.sequence_ids >= 0
            visible[:, 0] = True  # an idle rank's batch has no sequence, and a softmax over nothing is NaN
            inputs["attention_mask"] = visible
        else:
            inputs["documents"] = spans.documents_of(batch, self.context)
        positions = batch.position_ids[..., start:end]
        with tower:
            output = self._backbone(
                position_ids=positions[0] if positions.shape[0] == 1 else positions,
                # A cache would be written again by recomputed blocks, and the keys of a block would then come twice.
                use_cache=False,
                **inputs,
            )
        if cache_of(output) is not None:
            raise ModelError(
                f"{type(self.language_model).__name__} returned a key/value cache although none was asked for."
            )
        hidden: Tensor = output.last_hidden_state
        return hidden

    def _image_inputs(self, batch: Batch, start: int, end: int) -> tuple[dict[str, Any], AbstractContextManager[None]]:
        """Return what the backbone reads of positions `start` to `end` and of images, and what to enter around it."""
        tokens = self._with_one_image_token(batch)
        inputs = {"input_ids": tokens[:, start:end], **tensor_arguments(batch.model_inputs)}
        if self.family.image_tokens is not None:
            argument, token = self.family.image_tokens
            inputs[argument] = (inputs["input_ids"] == token).long()
        if batch.span is None or self.family.image_token_id is None:
            return inputs, nullcontext()
        is_image = tokens == self.family.image_token_id
        return inputs, towers.features_of_span(self._backbone, is_image, batch.span)

    def _with_one_image_token(self, batch: Batch) -> Tensor:
        """Return the tokens, with the image token where features go, of videos too, and nowhere else.

        The tower runs once over images and videos: ranks that have both would call it more often than others, and wait
        for them for ever. For an image token that the policy chose itself there is no image, and transformers' models
        count. It ends its completion, so nothing reads it there. Tokens of an image are never trained, which tells the
        two apart; so it is with a video's.
        """
        token = self.family.image_token_id
        if token is None:
            return batch.tokens
        tokens = batch.tokens.masked_fill(batch.loss_mask & (batch.tokens == token), 0 if token else 1)
        return torch.where(batch.loss_mask, tokens, self.family.with_one_image_token(tokens))

    def upstream_values(self, tokens: Tensor, inputs: Mapping[str, Tensor] | None = None) -> Tensor:
        """Score one sequence by transformers' own forward: the yardstick of the check at start.

        Args:
            tokens: [L] int64
            inputs: Its images.

        Returns:
            [L - 1] log-probabilities of tokens 1..L-1, float32 or better.
        """
        output = reader_of(self.language_model)(input_ids=tokens[None], use_cache=False, **(inputs or {}))
        logits: Tensor = output.logits[0, :-1]
        wide = logits if logits.dtype == torch.float64 else logits.float()
        # A copy, not a view: FSDP2 hangs its backward pass on what a method returns.
        return wide.log_softmax(-1).gather(1, tokens[1:, None]).squeeze(1).clone()

    @torch.no_grad()
    def upstream_hidden(self, tokens: Tensor) -> Tensor:
        """Return [L, H], what transformers' own backbone makes of one sequence."""
        hidden: Tensor = self._backbone(input_ids=tokens[None], use_cache=False).last_hidden_state[0]
        return hidden

    @torch.no_grad()
    def upstream_head(self, tokens: Tensor) -> HeadProbe | None:
        """Return what transformers' own head makes of one sequence, and of a ramp; None where that cannot be seen.

        In the place of the last token's logits the output layer gives a ramp, so that whatever a model makes of what
        its output layer gives is seen over its whole range, however small the logits are. It cannot be seen of a model
        that does not call its backbone and its output layer once each.
        """
        ended: list[Tensor] = []
        entered: list[Tensor] = []
        sent: list[Tensor] = []

        def with_ramp(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            output = output.clone()
            ramp = torch.linspace(-RAMP, RAMP, output.shape[-1], device=output.device)
            output[0, -1] = ramp.to(output.dtype)
            entered.append(args[0][0, -1])
            sent.append(output[0, -1])
            return output

        hooks = [
            self._backbone.register_forward_hook(lambda _, __, output: ended.append(output.last_hidden_state[0, -1])),
            self._output_layer.register_forward_hook(with_ramp),
        ]
        try:
            output = reader_of(self.language_model)(input_ids=tokens[None], use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        if len(sent) != 1 or len(ended) != 1:
            return None
        biased = getattr(self._output_layer, "bias", None) is not None
        return HeadProbe(
            output.logits[0, :-1], ended[0].clone(), entered[0].clone(), sent[0].clone(), output.logits[0, -1], biased
        )

    @cached_property
    def _backbone(self) -> Any:
        # A cached property is set in the instance's own dict: no module is registered under a second name.
        return backbone_of(self.language_model)

    @cached_property
    def _output_layer(self) -> Any:
        return output_layer_of(self.language_model)

    def _with_head(self, hidden: Tensor, use: UseOfHead[Made], *, again: bool) -> Made:
        """Return what `use` makes of hidden states [N, H] and the head, which is gathered while it runs.

        Args:
            hidden: That predict the scored tokens.
            use: Of both, a differentiable function.
            again: Whether the backward pass of what it returns reads the head's parameters.
        """
        result: Made = self._output_layer(hidden, use, again=again)
        return result


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Leave dropout out within the block, as evaluation does."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
