"""A chunk's logits: what one sweep over them gives, and their slopes; by torch's operations or by Triton kernels."""
