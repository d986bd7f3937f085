"""What every section of the configuration shares: frozen, closed to unknown keys, documented field by field."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, ClassVar, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

Mistake = tuple[str, str]
"""A key of the section (dotted if it lies deeper), and what is wrong with it and what to write."""


LEFT_OUT = "left out: it may be secret"
"""Stands in the place of a value that is not public."""
_EARLIER = "left out: what a run's own code takes may be secret"
MARKS = (LEFT_OUT, _EARLIER, f"{_EARLIER}; name it again on the command line")
"""The same in the words of any version."""


def is_left_out(value: Any) -> bool:
    """Return whether a value is the mark of one that was left out."""
    return isinstance(value, str) and value in MARKS


class Declared(Enum):
    """What a section says of a key beside its type.

    Numbers, truth values and members of a `Literal` are public. A text is public only where its type says so, and
    nothing else is: free mappings, lists of commands, passwords in addresses.
    """

    PUBLIC = "public"
    """A text that may leave the run; passwords in it may not."""
    NUMBER = "number"
    """A value of any type that may leave the run if it is a number or a truth value."""
    VARIABLE = "variable"
    """A text that may leave the run if it is the name of an environment variable."""
    SPARED = "spared"
    """A value without which an export is complete: it belongs to training, or is in the model's own files."""


PublicStr = Annotated[str, Declared.PUBLIC]
VariableName = Annotated[str, Declared.VARIABLE]
Kwargs = Annotated[dict[str, Any], Declared.SPARED]
"""Arguments of a user's code that no evaluation runs."""
PrivateFields = Annotated[dict[str, Any], Declared.SPARED]
"""Fields of the model's own files."""
EvaluatedKwargs = dict[str, Any]
"""Arguments of a user's code that an evaluation runs too."""


class Section(BaseModel):
    """One section of the tree. Rules check and never assign: the file says what the run does."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
        strict=False,
        serialize_by_alias=True,
        ser_json_inf_nan="constants",  # in free mappings, which YAML writes as .inf and .nan
    )

    removed: ClassVar[Mapping[str, str]] = {}
    """What to do instead of a key that the section does not have and that people look for, by the key."""
    removed_kinds: ClassVar[Mapping[str, str]] = {}
    """What to do instead of a `kind` that does not exist and that people look for, by the kind."""

    def mistakes(self) -> Iterator[Mistake]:
        """Yield what is wrong with values that are right one by one but not together."""
        return iter(())

    @model_validator(mode="after")
    def _keep_the_rules(self) -> Self:
        mistakes = tuple(self.mistakes())
        if mistakes:
            text = "; ".join(f"{key}: {wrong}" for key, wrong in mistakes)
            raise PydanticCustomError("rules", "{text}", {"text": text, "mistakes": mistakes})
        return self


def _check_pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
    return pattern


def _check_function_path(path: str) -> str:
    file, colon, name = path.rpartition(":")
    if not colon or not file.endswith(".py") or not name.isidentifier():
        raise ValueError(f"{path!r} must name a function in a file, as in my_file.py:my_function")
    return path


def _check_import_path(path: str) -> str:
    module, colon, name = path.rpartition(":")
    is_module = all(identifier.isidentifier() for identifier in module.split("."))
    if not colon or not (module.endswith(".py") or is_module) or not name.isidentifier():
        raise ValueError(
            f"{path!r} must name a function in a file or in a module, as in my_file.py:my_function or "
            "package.module:my_function"
        )
    return path


def _refuse_truth_value(value: Any) -> Any:
    # Python counts True as 1, so `steps: true` would train one step.
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()} should be a number")  # noqa: TRY004  pydantic collects ValueErrors
    return value


Pattern = Annotated[PublicStr, AfterValidator(_check_pattern)]
"""A regular expression, searched (not anchored) in canonical parameter or module names."""

FunctionPath = Annotated[PublicStr, AfterValidator(_check_function_path)]
"""`file.py:function`; a relative file is looked up beside the YAML."""

ImportPath = Annotated[PublicStr, AfterValidator(_check_import_path)]
"""A function in a file, or in a module that can be imported."""

_A_NUMBER = BeforeValidator(_refuse_truth_value)

Number = Annotated[float, _A_NUMBER]
PositiveInt = Annotated[int, Field(ge=1), _A_NUMBER]
AtLeastTwo = Annotated[int, Field(ge=2), _A_NUMBER]
Count = Annotated[int, Field(ge=0), _A_NUMBER]
Seed = Annotated[int, Field(ge=0, lt=2**63), _A_NUMBER]
Positive = Annotated[float, Field(gt=0), _A_NUMBER]
NonNegative = Annotated[float, Field(ge=0), _A_NUMBER]
Fraction = Annotated[float, Field(ge=0, le=1), _A_NUMBER]
PositiveFraction = Annotated[float, Field(gt=0, le=1), _A_NUMBER]
ProperFraction = Annotated[float, Field(ge=0, lt=1), _A_NUMBER]

SavedCount = Annotated[int, Field(strict=True, ge=0)]
"""In a state that a run saved, where nothing is converted."""
SavedNumber = Annotated[float, Field(strict=True, allow_inf_nan=False)]


PATH = "path"
"""The kind of a section that names a function or a class in a file of the user's."""
_FUNCTION = re.compile(r"\.py:")


@dataclass(frozen=True)
class ByKind:
    """Makes a union of sections a tagged one: its `kind` chooses the member, and an option of another kind is refused.

    A section without a kind is of the default one, and a kind alone stands for a section: `recompute: full`. Where one
    of the kinds is `path`, a function in a file does too: `reward: my_reward.py:short`. The JSON schema says so, and
    an editor which follows it accepts what Holdfast accepts.
    """

    default: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        members: dict[str, CoreSchema] = {}
        for model in get_args(source) or (source,):
            members |= dict.fromkeys(kinds_of(model), handler.generate_schema(model))

        def with_kind(value: Any) -> Any:
            value = section_of(value, takes_functions=PATH in members) if isinstance(value, str) else value
            return {**value, "kind": str(value.get("kind", self.default))} if isinstance(value, Mapping) else value

        # What `Field(discriminator="kind")` makes; that refuses a union of one member, and members of several kinds.
        union = core_schema.tagged_union_schema(members, discriminator="kind")
        return core_schema.no_info_before_validator_function(with_kind, union)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        sections = []
        for member in handler(schema)["oneOf"]:
            kind = handler.resolve_ref_schema(member)["properties"]["kind"]
            is_default = self.default in kind.get("enum", [kind.get("const")])
            sections.append(member if is_default else {**member, "required": ["kind"]})
        kinds = list(schema["schema"]["choices"])
        functions = [{"pattern": _FUNCTION.pattern, "type": "string"}] if PATH in kinds else []
        return {"oneOf": [{"enum": kinds, "type": "string"}, *functions, *sections]}


def section_of(shorthand: str, *, takes_functions: bool) -> dict[str, Any]:
    """Return the section that a kind alone, or a function in a file, stands for."""
    is_function = takes_functions and _FUNCTION.search(shorthand)
    return {"kind": PATH, "path": shorthand} if is_function else {"kind": shorthand}


class OnOrSection:
    """Lets true stand for a section's defaults and false for null, in the file and in the JSON schema."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(_as_switched, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [{"type": "boolean"}, *handler(schema)["anyOf"]]}


def _as_switched(value: Any) -> Any:
    return ({} if value else None) if isinstance(value, bool) else value


@dataclass(frozen=True)
class TextOrSection:
    """Lets a text stand for a section with this key alone, in the file and in the JSON schema."""

    key: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def as_section(value: Any) -> Any:
            return {self.key: value} if isinstance(value, str) else value

        return core_schema.no_info_before_validator_function(as_section, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [{"type": "string"}, *handler(schema)["anyOf"]]}


class OneOrSeveral:
    """Lets one item stand for a list of one, in the file and in the JSON schema."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(_as_list, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        several = handler(schema)
        return {"anyOf": [several["items"], several]}


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else [value]


def keys_of(section: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of a section by their keys in a file: `from` is no name of an attribute in Python."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


def kinds_of(model: type[BaseModel]) -> tuple[str, ...]:
    """Return the kinds that a member of a tagged union stands for, its default first; none for any other section."""
    field = model.model_fields.get("kind")
    if field is None:
        return ()
    return tuple(dict.fromkeys([str(field.default), *map(str, get_args(field.annotation))]))


def differing(section: BaseModel) -> dict[str, Any]:
    """Return the JSON-ready values of a section that differ from their defaults; they read back to the same section.

    A section of a union keeps its `kind`, by which it is told from the others.
    """
    plain, values = section.model_dump(mode="json"), {}
    for name, field in type(section).model_fields.items():
        key, value = field.alias or name, getattr(section, name)
        if name == "kind":
            values[key] = plain[key]
        elif value != field.get_default(call_default_factory=True):
            values[key] = _differing_below(value, plain[key])
    return values


def _differing_below(value: Any, plain: Any) -> Any:
    match value:
        case BaseModel():
            return differing(value)
        case dict():
            return {key: _differing_below(value[key], plain[key]) for key in value}
        case list() | tuple():
            return [_differing_below(item, plain_item) for item, plain_item in zip(value, plain, strict=True)]
        case _:
            return plain


def leaves(values: Any, path: str = "", *, into_lists: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of every leaf of nested mappings, and of lists of mappings if asked for."""
    if into_lists and isinstance(values, list) and any(isinstance(item, dict) for item in values):
        values = dict(enumerate(values))
    if isinstance(values, dict) and values:
        for key, value in values.items():
            yield from leaves(value, f"{path}.{key}" if path else str(key), into_lists=into_lists)
    else:
        yield path, values
