"""Models: built on the meta device, filled tensor by tensor, scored in chunks of tokens to avoid full logits."""
