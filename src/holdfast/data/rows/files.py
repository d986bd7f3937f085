"""Find the data files that a `path` means, and assign them to splits."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from holdfast.config.path_kinds import KEYS, misplaced, pointer_refusal
from holdfast.data.rows.arrow_rows import ARROW_SUFFIXES, PARQUET_SUFFIXES, choose_split
from holdfast.data.rows.json_rows import JSON_SUFFIXES, TABLE_SUFFIXES
from holdfast.errors import DataError
from holdfast.files import REGULAR, expanded, file_kind

_KINDS = {
    "JSON": JSON_SUFFIXES,
    "parquet": PARQUET_SUFFIXES,
    "table": TABLE_SUFFIXES,
    "arrow": ARROW_SUFFIXES,
}
SUFFIXES = tuple(suffix for suffixes in _KINDS.values() for suffix in suffixes)
_FIRST = (*JSON_SUFFIXES, *PARQUET_SUFFIXES)
"""Where a directory has files of these kinds, those of others are tables beside the rows."""

_SPLIT_SUFFIX = re.compile(r"(?P<path>.+)@(?P<split>[\w.\-+%:\[\]]+)")
_SPLIT_IN_NAME = re.compile(r"(?<![a-z])(train|test|validation|valid|val|dev|eval)(?:ing)?(?![a-z])")
_CANONICAL = {"valid": "validation", "val": "validation", "dev": "validation", "eval": "validation"}
_GLOB = "*?["
_LOST = "lost+found"
"""Root's own folder in every file system of the ext family."""
_BESIDE_THE_DATA = {"dataset_infos.json", "dataset_info.json", "state.json"}


def split_off(path: str, base: Path) -> tuple[str, str | None]:
    """Divide `name@split`; an existing file whose own name has an `@` stays whole."""
    match = _SPLIT_SUFFIX.fullmatch(path)
    if match is None or any(candidate.exists() for candidate in local_places(path, base)):
        return path, None
    return match["path"], match["split"]


def local_places(path: str, base: Path) -> list[Path]:
    """Return where a path is looked for: from the current directory, then beside the YAML."""
    relative = expanded(path)
    return list(dict.fromkeys([Path.cwd() / relative, base.resolve() / relative]))


def find_local(path: str, base: Path) -> list[Path]:
    """Return the files or the directory that `path` or the glob means, or nothing if it is not here."""
    for candidate in local_places(path, base):
        if candidate.exists():
            return [candidate]
        if any(character in path for character in _GLOB):
            anchor = Path(candidate.anchor)
            matches = sorted(file for file in anchor.glob(str(candidate.relative_to(anchor))) if file.is_file())
            if matches:
                return matches
    return []


def find_files(path: str, base: Path, key: str = "data.path") -> list[Path]:
    """Return what `find_local` does; nothing where the hub may have a data set of this name.

    Args:
        path: As it is written.
        base: The YAML's directory.
        key: Of the path.

    Raises:
        DataError: Nothing is here, and no data set of the hub has such a name; or a path holds no rows.
    """
    paths = find_local(path, base)
    if not paths and not is_hub_name(path):
        raise DataError(
            f"{key}={path} is not there ({tried(path, base)}). A relative path starts here or beside the YAML."
        )
    for file in paths:
        refusal = misplaced(str(file), KEYS["data.path"], key)
        if refusal is not None:
            raise DataError(refusal)
    return paths


def tried(path: str, base: Path) -> str:
    """Say where a path was looked for in vain."""
    return "no such file or directory: " + ", ".join(str(candidate) for candidate in local_places(path, base))


def files_of_split(paths: Sequence[Path], split: str | None, path: str) -> list[Path]:
    """Return the data files of one split, in the order of their names.

    One file or a glob is the split `train`. In a directory the names say it (`train-00000.parquet`, `test/a.jsonl`);
    where no name does, all are `train`.

    Raises:
        DataError: No file can be read, kinds are mixed, or there is no such split.
    """
    splits = _by_name(paths[0]) if paths[0].is_dir() else {"train": list(paths)}
    if split is not None and split not in splits:
        split = _CANONICAL.get(split, split)
    files = splits[choose_split(splits, split, path)]
    for file in files:
        _refuse_without_rows(file)
    unknown = [file for file in files if not file.name.endswith(SUFFIXES)]
    if unknown:
        raise DataError(f"{unknown[0]} is no kind of file we read. {_conversion(unknown[0])}{_ends_in()}.")
    kinds = [kind for kind, suffixes in _KINDS.items() if any(file.name.endswith(suffixes) for file in files)]
    if len(kinds) > 1:
        example = next(file.suffix for file in files if file.name.endswith(_KINDS[kinds[-1]]))
        raise DataError(
            f"{path} holds both {kinds[0]} and {kinds[1]} files. Name one kind by a glob, as in {path}/*{example}."
        )
    return files


def _refuse_without_rows(file: Path) -> None:
    if (kind := file_kind(file)) != REGULAR:
        raise DataError(f"{file} is {kind}, not a regular file. Rows are read more than once; write a file.")
    if refusal := pointer_refusal(file):
        raise DataError(refusal)


def _ends_in() -> str:
    """Say which files are read."""
    plain = ", ".join(suffix for suffix in SUFFIXES if not suffix.endswith(".gz"))
    return f"Files of rows end in {plain}; a .gz may follow where they are text, as in rows.jsonl.gz"


def _conversion(file: Path) -> str:
    """Say how a file becomes one that is read, where a command does it; else ""."""
    name = shlex.quote(str(file))
    match file.suffix:
        case ".zst":
            return f"Unpack it with `zstd -d {name}`. "
        case ".txt":
            each_line = "[print(json.dumps({'text': text})) for text in map(str.strip, sys.stdin) if text]"
            target = shlex.quote(str(file.with_suffix(".jsonl")))
            return f'Write its lines as rows with `python -c "import json, sys; {each_line}" < {name} > {target}`. '
    return ""


def _by_name(directory: Path) -> dict[str, list[Path]]:
    data_files = _data_files(directory)
    if not data_files:
        other = next((file for file in sorted(directory.iterdir()) if _conversion(file)), None)
        hint = "" if other is None else f"It holds {other.name}. {_conversion(other)}"
        raise DataError(f"{directory} has no data files. {hint}{_ends_in()}.")
    files = [file for file in data_files if file.name.endswith(_FIRST)] or data_files
    splits: dict[str, list[Path]] = {}
    unnamed: list[Path] = []
    for file in files:
        split = _split_of(file.relative_to(directory))
        (unnamed if split is None else splits.setdefault(split, [])).append(file)
    if unnamed and splits:
        raise DataError(
            f"{directory}: {unnamed[0].name} carries no split in its name, but other files do ({', '.join(splits)}). "
            f"Name the files you mean by a glob, as in {directory}/*.jsonl."
        )
    return dict(sorted(splits.items())) or {"train": unnamed}


def _data_files(directory: Path) -> list[Path]:
    """Return the files below a directory that may hold rows, sorted; a linked folder is not followed.

    Raises:
        DataError: A folder cannot be read.
    """
    below = (Path(folder) / name for folder, _, names in os.walk(directory, onerror=_refuse) for name in names)
    return sorted(
        file for file in below if file.name.endswith(SUFFIXES) and file.name not in _BESIDE_THE_DATA and file.is_file()
    )


def _refuse(error: OSError) -> None:
    """Refuse a folder that cannot be read: pathlib would leave its rows out without a word."""
    if Path(error.filename).name == _LOST:
        return
    raise DataError(
        f"{error.filename} cannot be read ({error.strerror}), and rows may be in it. Grant the permission, or name the "
        "files you mean by a glob."
    ) from error


def _split_of(relative: Path) -> str | None:
    """Return the split that the file's name says, else the one its innermost folder says."""
    for component in reversed(relative.parts):
        match = _SPLIT_IN_NAME.search(component.lower())
        if match:
            return _CANONICAL.get(match[1], match[1])
    return None


def is_hub_name(path: str) -> bool:
    """Say whether `path` can name a data set of the hub: `name` or `owner/name`, and no data file."""
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path) is not None and not path.endswith(SUFFIXES)


def default_name(path: str) -> str:
    """Return the file's stem, the directory's name, or what comes before a glob."""
    components = [component for component in Path(path).parts if not any(character in component for character in _GLOB)]
    last = components[-1] if components else path
    suffix = next((suffix for suffix in sorted(SUFFIXES, key=len, reverse=True) if last.endswith(suffix)), "")
    return last.removesuffix(suffix) or last
