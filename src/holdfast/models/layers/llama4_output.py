"""Lets the forward pass of Llama 4 with a vision tower end in transformers 5.24.0.

`Llama4ForConditionalGeneration.forward` reads `image_outputs` of its language model's output, which has no such field.
With a transformers as the oldest whose `Llama4ForConditionalGeneration` does not, this file goes.
"""

from __future__ import annotations


def give_image_outputs() -> None:
    """Give outputs of language models with experts the field, as None; doing it again changes nothing."""
    from transformers.modeling_outputs import MoeCausalLMOutputWithPast

    if not hasattr(MoeCausalLMOutputWithPast, "image_outputs"):
        MoeCausalLMOutputWithPast.image_outputs = None
