"""Cut a student out of a model, every other layer of it: python examples/real/student.py MODEL STUDENT"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """Write the student with its tokenizer."""
    source, target = sys.argv[1:3]
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    kept = torch.nn.ModuleList(list(model.model.layers)[::2])
    for place, layer in enumerate(kept):
        layer.self_attn.layer_idx = place  # of the layer in a cache
    model.model.layers = kept
    model.config.num_hidden_layers = len(kept)
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)
    print(f"{target}: {len(kept)} layers, {sum(value.numel() for value in model.parameters()):,} parameters")


if __name__ == "__main__":
    main()
