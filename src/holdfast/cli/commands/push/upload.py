"""`holdfast push`: uploads an export with the hub's own client. Only the files that are listed here may be uploaded.

A repository is made private unless asked otherwise, nothing that is there is replaced without a word, and what arrived
is compared with what was sent by the hashes that the hub computed of it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from holdfast.config.load import EXPORTED_CONFIG
from holdfast.config.public import public_configuration, public_text
from holdfast.config.yaml12 import parse_file, to_yaml
from holdfast.errors import RunStopped, UserError
from holdfast.files import read_json, size_words
from holdfast.models.files.places import local_directory
from holdfast.text.escaping import escaped

_ALLOWED = (
    "*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "adapter_config.json",
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "*.tiktoken", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.*", "*processor_config.json",
    "README*.md", "LICENSE*", "holdfast_export.json", EXPORTED_CONFIG,
)  # fmt: skip
"""What an export may publish, by name; never samples, logs, pickles or code."""
_ABOUT = "holdfast_export.json"
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*")


@dataclass(frozen=True)
class OutgoingFiles:
    """A file that is uploaded."""

    content: Path | bytes
    size: int
    sha256: str
    git_blob: str
    """The SHA-1 by which git names it."""


def push(export: Path, repository: str, *, public: bool, overwrite: bool) -> Iterator[str]:
    """Upload an export, and yield what was done, line by line.

    Args:
        export: Its directory.
        repository: `owner/name` on the hub.
        public: Whether a new repository is public, and one that is public may be written.
        overwrite: Whether files there that have other contents are replaced.

    Raises:
        UserError: It is not an export, or was changed; nobody is logged in; or the hub or the rules above refuse.
        RunStopped: What arrived is not what was sent.
    """
    if not _REPOSITORY.fullmatch(repository):
        raise UserError(f"{repository} is not the name of a repository. Give OWNER/NAME, for example me/my-model.")
    title = _check_export(export)
    files, left_out = outgoing_files(export)
    from huggingface_hub import CommitOperationAdd, HfApi, get_token

    if get_token() is None:
        raise UserError(
            "Nobody is logged in to the hub: run `hf auth login`, or set HF_TOKEN to a token that may write."
        )
    api = HfApi(library_name="holdfast")
    with _hub_errors(repository):
        remote_files, head = _what_is_there(api, repository, public=public)
        new = {name: file for name, file in files.items() if not _is_same(file, remote_files.get(name))}
        _refuse_overwriting(repository, [name for name in new if name in remote_files], overwrite=overwrite)
        yield f"{export}: {title}, every byte of its weights as it was exported"
        if left_out:
            yield f"left out, since only a model's own files are published: {', '.join(map(escaped, left_out))}"
        if not new:
            yield f"{repository} has all {len(files)} files already"
            return
        if head is None:
            api.create_repo(repository, private=not public, exist_ok=False)
            yield f"{repository} is made, {'public' if public else 'private'}"
        additions = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=_content(new[name])) for name in new]
        commit = api.create_commit(repository, additions, commit_message=f"Export of {title}", parent_commit=head)
        yield f"{len(new)} files, {size_words(sum(file.size for file in new.values()))}, are commit {commit.oid[:12]}"
        remote_files, _ = _what_is_there(api, repository, public=public, revision=commit.oid)
    _check_arrived(repository, commit.oid, files, remote_files)
    yield f"verified: the hub's hashes of all {len(files)} files are ours. {commit.commit_url}"


def _check_arrived(
    repository: str, commit: str, files: Mapping[str, OutgoingFiles], remote_files: Mapping[str, Any]
) -> None:
    wrong = [name for name, file in files.items() if not _is_same(file, remote_files.get(name))]
    if wrong:
        raise RunStopped(
            f"{repository} does not hold what was sent: {', '.join(wrong)} differ by size or hash at commit "
            f"{commit[:12]}. Push again with --overwrite, and do not load what is there."
        )


def _check_export(export: Path) -> str:
    from holdfast.checkpoint.export.about import check_weights, read_about

    if not export.exists():
        local_directory(str(export), Path.cwd())  # says whose export it would be
    exported = read_about(export)
    if exported is None:
        raise UserError(
            f"{export} is not an export of Holdfast: it has no {_ABOUT}. `holdfast checkpoint export` makes one."
        )
    check_weights(export, exported, by_hash=True)
    return exported.words


def outgoing_files(export: Path) -> tuple[dict[str, OutgoingFiles], list[str]]:
    """Return what of an export is uploaded, by name, and the names of what stays.

    The configuration goes without what could be secret, and so does what the export says of its parent.
    """
    names = sorted(path.name for path in export.iterdir() if path.is_file() and not path.is_symlink())
    allowed = [name for name in names if any(fnmatch(name, pattern) for pattern in _ALLOWED)]
    left_out = sorted(path.name for path in export.iterdir() if path.name not in allowed)
    files: dict[str, OutgoingFiles] = {}
    for name in allowed:
        match name:
            case "holdfast.yaml":
                files[name] = _outgoing(to_yaml(public_configuration(parse_file(export / name).values)).encode())
            case "holdfast_export.json":
                values = read_json(export / name)
                parent = values.get("parent")
                if isinstance(parent, dict):
                    texts = {key: public_text(value) for key, value in parent.items() if isinstance(value, str)}
                    values["parent"] = parent | texts
                files[name] = _outgoing((json.dumps(values, indent=2, sort_keys=True) + "\n").encode())
            case _:
                files[name] = _outgoing(export / name)
    return files, left_out


def _outgoing(content: Path | bytes) -> OutgoingFiles:
    size = content.stat().st_size if isinstance(content, Path) else len(content)
    sha256, blob = hashlib.sha256(), hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    if isinstance(content, Path):
        with content.open("rb") as file:
            while block := file.read(1 << 20):
                sha256.update(block)
                blob.update(block)
    else:
        sha256.update(content)
        blob.update(content)
    return OutgoingFiles(content, size, sha256.hexdigest(), blob.hexdigest())


def _content(file: OutgoingFiles) -> str | bytes:
    return str(file.content) if isinstance(file.content, Path) else file.content


def _what_is_there(
    api: Any, repository: str, *, public: bool, revision: str | None = None
) -> tuple[Mapping[str, Any], str | None]:
    """Return the files of a repository by name, and its last commit; None where there is no repository.

    Raises:
        UserError: It is public, and that was not asked for.
    """
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        info = api.repo_info(repository, revision=revision, files_metadata=True)
    except RepositoryNotFoundError:
        return {}, None
    if info.private is False and not public:
        raise UserError(f"{repository} is public. Give --public if everybody may have this model, or name another one.")
    return {sibling.rfilename: sibling for sibling in info.siblings or ()}, info.sha


def _is_same(file: OutgoingFiles, remote: Any) -> bool:
    if remote is None or remote.size != file.size:
        return False
    lfs = remote.lfs
    return bool(lfs.sha256 == file.sha256 if lfs is not None else remote.blob_id == file.git_blob)


def _refuse_overwriting(repository: str, changed: list[str], *, overwrite: bool) -> None:
    if changed and not overwrite:
        raise UserError(
            f"{repository} has other contents under {len(changed)} of the names: {', '.join(changed[:6])}. Nothing was "
            "sent. Give --overwrite to replace them (its history keeps them), or name another repository."
        )


@contextmanager
def _hub_errors(repository: str) -> Iterator[None]:
    """Say in a paragraph what the hub, or the way to it, has against it."""
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    transport_error = HfHubHTTPError.__bases__[0]  # of httpx or of what came after it, by the version of the client
    try:
        yield
    except HfHubHTTPError as error:
        code = error.response.status_code if error.response is not None else None
        reason = " ".join(str(error.server_message or error).split())[:300]
        hint = {
            401: "The token is not valid: run `hf auth login` again, or set HF_TOKEN.",
            403: "The token may not write there: take one with write access, or another owner.",
            409: "It changed meanwhile, or its name is taken; look at it, then push again.",
            412: "It changed meanwhile; look at it, then push again.",
            413: "A file is larger than the hub takes; export with a smaller checkpoint.export_shard_bytes.",
        }.get(code or 0, "Try again later; files that have arrived are not sent twice.")
        raise UserError(f"The hub refused {repository} ({code}): {escaped(reason)}. {hint}") from error
    except (transport_error, OfflineModeIsEnabled, ConnectionError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"The hub cannot be reached for {repository}: {escaped(reason)}. Nothing was published."
        ) from error
