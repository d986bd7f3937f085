"""The reference policy behind an endpoint: where it is to have the policy's weights, it says what the policy says."""

from __future__ import annotations

import numpy as np

from holdfast.config.sections.reference import ServerReferenceConfig
from holdfast.errors import ModelError
from holdfast.training.run import ShardedModel
from holdfast.training.scorers.server import Role, ScoringServer, meet

_ROLE = Role("reference", "reference policy", "policy")
NO_IMAGES = "reference.kind: server sends tokens, and no images; use sharded"
"""Why no row may have images."""


def connect_reference(policy: ShardedModel, section: ServerReferenceConfig, *, why: str) -> ScoringServer:
    """Return the reference policy behind an endpoint, compared with the policy; all ranks call this together.

    Args:
        policy: Freshly built: as it is at the start of the run.
        section: Where the endpoint is.
        why: What needs it, for the user.

    Raises:
        ConfigError: It cannot be reached, or does not serve what is asked for; the same on all ranks.
        ModelError: Its tokenizer, its vocabulary or its weights are not the policy's.
    """
    scoring_server, compared = meet(policy, section, _ROLE, samples=policy.setting.config.samples, drift=section.bound)
    probe, model = scoring_server.probe, scoring_server.server.model
    difference = max(policy.setting.ranks.gather(float(np.abs(probe.told_by(policy) - probe.logprobs).max())))
    if section.bound is not None and not difference <= section.bound:
        raise ModelError(
            f"reference: {model} at {section.url} is not the model at start: of one text their log-probabilities "
            f"differ by {difference:.2g} nats, and reference.bound is {section.bound:g}. Serve the weights of "
            "model.path; or set reference.bound: null if another reference is what you want, or a larger bound if its "
            "precision is lower."
        )
    if policy.setting.world.is_first:
        note = "" if compared else "; its tokenizer could not be compared, since it named no tokens"
        print(
            f"reference policy: {model} at {section.url}, for {why}; of one text its log-probabilities differ "
            f"from the policy's by at most {difference:.1e} nats{note}",
            flush=True,
        )
    return scoring_server
