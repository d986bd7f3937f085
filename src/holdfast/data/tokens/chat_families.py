"""Templates of known families, with the assistant's words marked.

Each is used for its marks alone: only where it writes a conversation exactly as the tokenizer's own template does.
That is what helps a template that has neither a generation block nor an `add_generation_prompt`.
"""

from __future__ import annotations

from collections.abc import Mapping


def _tagged(before_role: str, after_role: str, end: str, after_end: str, *, start: str = "") -> str:
    """Write a template in which each message is `<role tag>content<end>`."""
    return (
        start
        + "{% for message in messages %}"
        + f"{before_role}{{{{ message.role }}}}{after_role}"
        + "{% if message.role == 'assistant' %}"
        + f"{{% generation %}}{{{{ message.content }}}}{end}{{% endgeneration %}}"
        + "{% else %}"
        + f"{{{{ message.content }}}}{end}"
        + "{% endif %}"
        + f"{after_end}"
        + "{% endfor %}"
        + f"{{% if add_generation_prompt %}}{before_role}assistant{after_role}{{% endif %}}"
    )


FAMILIES: Mapping[str, str] = {
    "chatml": _tagged("<|im_start|>", "{{ '\\n' }}", "<|im_end|>", "{{ '\\n' }}"),
    "llama3": _tagged(
        "<|start_header_id|>", "<|end_header_id|>{{ '\\n\\n' }}", "<|eot_id|>", "", start="{{ bos_token }}"
    ),
    "zephyr": _tagged("<|", "|>{{ '\\n' }}", "{{ eos_token }}", "{{ '\\n' }}"),
    "phi": _tagged("<|", "|>{{ '\\n' }}", "<|end|>", "{{ '\\n' }}"),
}
