"""Build the class of a model's processor from its image processor and its tokenizer, without torchvision.

transformers loads a processor whole, and its part for videos needs torchvision. The class itself needs that part for
videos alone. A subclass stands in for it that accepts None in the place of a part.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from holdfast.errors import ModelError
from holdfast.files import read_json

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")

_CLASS = "processor_class"

_CLASS_OF = {"smolvlm": "Idefics3Processor"}
"""Classes in the place of a family's own: SmolVLM's writes the same for images, and wants num2words, for videos."""

_ROUNDS = 12
"""Tokens that a tokenizer may lack by name; the configuration says which they are."""


class NoProcessor(ModelError):
    """A processor that cannot be built here; this says nothing against the model."""


def processor_settings(directories: Sequence[Path]) -> dict[str, Any]:
    """Return what a model's files say of its processor: the class by `processor_class`, and arguments of that class.

    Raises:
        ModelError: A file is not JSON.
    """
    of_parts, of_whole = (_first_of(name, directories) for name in PROCESSOR_FILES)
    named = {name: of_parts[name] for name in (_CLASS,) if name in of_parts}
    return named | {
        name: value for name, value in of_whole.items() if not isinstance(value, dict) and value is not None
    }


def _first_of(name: str, directories: Sequence[Path]) -> dict[str, Any]:
    file = next((folder / name for folder in directories if (folder / name).exists()), None)
    try:
        values = {} if file is None else read_json(file)
    except ValueError as error:
        raise ModelError(f"{file} is not JSON: {error}.") from None
    return values if isinstance(values, dict) else {}


def whole_processor(image_processor: Any, tokenizer: Any, config: Any, settings: Mapping[str, Any]) -> Any:
    """Return transformers' processor of a model.

    Args:
        image_processor: The part for images, which needs PIL alone.
        tokenizer: It is copied, since processors add tokens to theirs.
        config: The model's configuration. Arguments that are in no file follow its fields of the same name.
        settings: From the model's files, as `processor_settings` returns them.

    Raises:
        NoProcessor: transformers has no such class, or cannot build it without torchvision.
    """
    processor_class = _without_videos(_class_of(config, settings))
    arguments = {**_from_config(processor_class, config), **_OLDER.get(config.model_type, _nothing)(config)}
    accepted = inspect.signature(processor_class.__init__).parameters
    arguments |= {name: value for name, value in settings.items() if name in accepted}
    parts = dict.fromkeys(processor_class.get_attributes()) | {"image_processor": image_processor}
    arguments = {name: value for name, value in arguments.items() if name not in parts}
    tokenizer = copy.deepcopy(tokenizer)
    name = processor_class.__name__
    for _ in range(_ROUNDS):
        try:
            return processor_class(**parts | {"tokenizer": tokenizer}, **arguments)
        except AttributeError as error:
            if not _name_token(tokenizer, error, config):
                raise NoProcessor(f"transformers' {name} cannot be built: {error}") from None
        except (TypeError, ValueError, ImportError) as error:
            raise NoProcessor(f"transformers' {name} cannot be built: {error}") from None
    raise NoProcessor(f"transformers' {name} cannot be built: its tokenizer names too few tokens")


def write_processor(directory: Path, processor: Any, options: Mapping[str, Any]) -> None:
    """Write the files of a processor for another process, which then prepares images as this one does.

    Args:
        directory: Where to; files of a processor that are there are replaced.
        processor: From `whole_processor`.
        options: Settings of the image processor in the place of its own.
    """
    images = processor.image_processor
    of_images = json.loads(images.to_json_string()) | dict(options)
    names = inspect.signature(type(processor).__init__).parameters.keys() - {"chat_template"}
    settings = {name: getattr(processor, name, None) for name in names}
    of_whole = {name: value for name, value in settings.items() if isinstance(value, str | int | float)}
    of_whole |= {_CLASS: type(processor).__name__}
    for name, values in zip(PROCESSOR_FILES, (of_images, of_whole), strict=True):
        (directory / name).write_text(json.dumps(values, indent=2, sort_keys=True), encoding="utf-8")


def _nothing(_: Any) -> dict[str, int]:
    return {}


def _of_llava(config: Any) -> dict[str, int]:
    """Return how many tokens beside the patches the tower has."""
    return {"num_additional_image_tokens": int("clip" in config.vision_config.model_type)}


def _of_idefics3(config: Any) -> dict[str, int]:
    side = config.vision_config.image_size // config.vision_config.patch_size
    return {"image_seq_len": int(side**2 // config.scale_factor**2)}


_OLDER: Mapping[str, Callable[[Any], dict[str, int]]] = {
    "llava": _of_llava,
    "llava_next": _of_llava,
    "gemma3": lambda config: {"image_seq_length": config.mm_tokens_per_image},
    "idefics3": _of_idefics3,
    "smolvlm": _of_idefics3,
}
"""By model_type, arguments of the processor's class that older directories have in no file."""


def _class_of(config: Any, settings: Mapping[str, Any]) -> Any:
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    names = dict(PROCESSOR_MAPPING_NAMES)
    name = _CLASS_OF.get(config.model_type) or settings.get(_CLASS) or names.get(config.model_type)
    if name is None:
        raise NoProcessor(f"transformers names no processor for {config.model_type}")
    problem: Exception | None = None
    for folder in [config.model_type, *(kind for kind, other in names.items() if other == name)]:
        try:
            return getattr(_imported(folder.replace("-", "_")), name)
        except (ImportError, AttributeError) as error:
            problem = error if problem is None or "torchvision" in str(error) else problem
    raise NoProcessor(f"transformers' {name} cannot be imported: {problem}")


def _imported(folder: str) -> ModuleType:
    """Import the module of a processor; where it imports functions of the image processor for torchvision, PIL's."""
    package = f"transformers.models.{folder}"
    theirs, ours = f"{package}.image_processing_{folder}", f"{package}.image_processing_pil_{folder}"
    try:
        return importlib.import_module(f"{package}.processing_{folder}")
    except ModuleNotFoundError as error:
        if error.name != "torchvision":
            raise
    sys.modules[theirs] = importlib.import_module(ours)
    try:
        return importlib.import_module(f"{package}.processing_{folder}")
    finally:
        del sys.modules[theirs]


def _without_videos(processor_class: Any) -> Any:
    """Return a subclass that accepts None for a part, and is otherwise the class itself."""

    def check(self: Any, name: str, argument: Any) -> Any:
        return None if argument is None else processor_class.check_argument_for_proper_class(self, name, argument)

    names = {"__module__": processor_class.__module__, "__qualname__": processor_class.__qualname__}
    return type(processor_class.__name__, (processor_class,), {"check_argument_for_proper_class": check, **names})


def _from_config(processor_class: Any, config: Any) -> dict[str, Any]:
    """Return the fields of a configuration that are called like arguments of a processor's class."""
    names = set(inspect.signature(processor_class.__init__).parameters) - {"self", "kwargs", "chat_template"}
    sections = (getattr(config, "vision_config", None), config)
    found = {name: getattr(section, name, None) for section in sections for name in names if hasattr(section, name)}
    return {name: value for name, value in found.items() if value is not None}


def _name_token(tokenizer: Any, error: AttributeError, config: Any) -> bool:
    """Give a tokenizer the token that a processor asks for by name, if the configuration has its id."""
    role = str(error.name or "").removesuffix("_id")
    if id(error.obj) != id(tokenizer) or not role.endswith("_token"):
        return False
    token_id = getattr(config, f"{role}_id", None)
    token_id = getattr(config, f"{role}_index", None) if token_id is None else token_id
    token = None if token_id is None else tokenizer.convert_ids_to_tokens(token_id)
    if token is None:
        return False
    setattr(tokenizer, role, token)
    setattr(tokenizer, f"{role}_id", token_id)
    return True
