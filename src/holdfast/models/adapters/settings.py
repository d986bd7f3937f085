"""What a directory in peft's format says beside its tensors: by how much its adapters count."""

from __future__ import annotations

from pathlib import Path

from holdfast.config.paths import expanded
from holdfast.config.sections.lora import LoRAConfig
from holdfast.errors import ModelError
from holdfast.files import read_json

SETTINGS = "adapter_config.json"


def note_of_base(directory: Path, model: str, here: Path) -> str | None:
    """Return what a user should read of adapters that nothing but a name ties to their base; None if it is the same.

    Args:
        directory: Of the adapters.
        model: What the run calls its model.
        here: Where that lies.
    """
    file = directory / SETTINGS
    named_base = read_json(file).get("base_model_name_or_path") if file.exists() else None
    if not named_base or str(named_base) == model or expanded(str(named_base)).resolve() == here:
        return None
    return (
        f"lora: the adapter in {directory} names {named_base} as its model, and this run's is {model}; no mark in its "
        "file tells whether the weights are the same. Beside other weights it does not do what it was trained for."
    )


def refuse_other_scale(directory: Path | None, section: LoRAConfig) -> None:
    """See that adapters to start from count by the factor they were trained with; tensors do not tell it.

    Raises:
        ModelError: They count by another one under `model.lora`, or their settings cannot be read.
    """
    if directory is None or not (directory / SETTINGS).exists():
        return
    file = directory / SETTINGS
    try:
        settings = read_json(file)
        stabilised, alone = bool(settings.get("use_rslora", False)), dict(settings.get("alpha_pattern") or {})
        there = {"alpha": f"{settings.get('lora_alpha', section.alpha):g}", "rank_stabilised": str(stabilised).lower()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        why = f"{file} is not what peft writes ({error})"
        raise ModelError(f"model.lora.path: {why}. Save the adapter again.") from error
    if alone:
        raise ModelError(
            f"model.lora.path: {file} gives {len(alone)} layers an alpha of their own ({next(iter(alone))}), and "
            "model.lora has one for all. Merge this adapter into its model, and start from that."
        )
    here = {"alpha": f"{section.alpha:g}", "rank_stabilised": str(section.rank_stabilised).lower()}
    for name, value in here.items():
        if there[name] != value:
            raise ModelError(
                f"model.lora.{name} is {value}, and the adapter in {directory} was trained with {there[name]}: it "
                f"would count by another factor than then. Set model.lora.{name}: {there[name]}."
            )
