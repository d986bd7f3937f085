"""Complete generated questions by plain transformers.

Run as `python -m holdfast.cli.commands.generate.plain_completion DIRECTORY COUNT`.

Nothing of Holdfast's models or engines takes part; what loads here loads anywhere.
"""

from __future__ import annotations

import sys

from holdfast.config.quiet import hush, leave_out_broken
from holdfast.config.sections.data import SyntheticConfig
from holdfast.data.tasks.synthetic import SyntheticSource, check_answer


def main() -> None:
    """Print the share of right answers."""
    hush()
    leave_out_broken()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    directory, count = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    disable_progress_bar()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    source = SyntheticSource(SyntheticConfig(task="sort", rows=count, seed=3))
    right = 0
    for index in range(count):
        row = source.row(index)
        tokens = tokenizer(row["prompt"], return_tensors="pt", add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            out = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=8, do_sample=False)
        right += check_answer(row, tokenizer.decode(out[0, tokens.shape[1] :], skip_special_tokens=True))
    print(f"{right / count:.3f}")


if __name__ == "__main__":
    main()
