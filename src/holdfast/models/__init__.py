"""Models: built on the meta device, filled tensor by tensor, scored without ever holding a sequence's logits."""
