"""The kinds of bytes and the phases of a step that a plan counts. This module imports nothing heavy."""

PARAMETERS, GATHERED, GRADIENTS, OPTIMIZER = "parameters", "gathered", "gradients", "optimizer"
ACTIVATIONS, HEAD, TEMPORARY = "activations", "head", "temporary"
ROLLOUT_WEIGHTS, CACHE, REFERENCE, CHECKPOINT = "rollout_weights", "key_value_cache", "reference", "checkpoint"
KINDS = {
    PARAMETERS: "this rank's shards, and what is not sharded",
    GATHERED: "whole parameters of units that are in use, and what they are gathered through; on one rank its copies",
    GRADIENTS: "of this rank's shards, those of a unit before they are reduced, and what they are reduced through",
    OPTIMIZER: "states of the optimizer, averages of weights",
    ACTIVATIONS: "what a forward pass makes, kept or made again",
    HEAD: "logits of a chunk, gradients of the output matrix and of what goes into it",
    TEMPORARY: "what a backward pass, an optimizer or a collective needs for a moment",
    ROLLOUT_WEIGHTS: "the copy that completions are sampled with",
    CACHE: "keys and values of completions, and what decoding needs beside them",
    REFERENCE: "shards of the reference policy or the teacher",
    CHECKPOINT: "the copy of a snapshot in host memory",
}
"""What bytes are counted as, and what belongs to it."""

PHASES = {
    "load": "load",
    "to_host": "rollout",
    "rollout": "rollout",
    "from_host": "rollout",
    "proximal": "scoring",
    "reference": "scoring",
    "teacher": "scoring",
    "values": "scoring",
    "advantage": "scoring",
    "divergence": "scoring",
    "forward": "forward",
    "backward": "backward",
    "step": "backward",
    "optimizer": "optimizer",
    "save": "save",
}
"""What a step is in -> the row of the table that it belongs to."""
ORDER = ("load", "rollout", "scoring", "forward", "backward", "optimizer", "save")
RESUME = "resume"
"""The phase in which a checkpoint is loaded, and the row of the table for that and the first step after it."""
