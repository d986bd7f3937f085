"""`holdfast push`: uploads an export with the hub's own client. Only the files that are listed here may be uploaded.

A repository is made private unless asked otherwise, nothing that is there is replaced without a word, and what arrived
is compared with what was sent by the hashes that the hub computed of it.
"""

# As cli/main.py, without `from __future__ import annotations`.
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.cli.arguments import takes
from holdfast.config.path_kinds import PathKind
from holdfast.errors import RunStopped, UserError
from holdfast.files import read_json, size_words
from holdfast.text.escaping import escaped

_ALLOWED = (
    "*.gguf", "*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json",
    "adapter_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "*.tiktoken",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.*",
    "*processor_config.json", "README*.md", "LICENSE*", "holdfast_export.json", "holdfast.yaml",
)  # fmt: skip
"""What an export may publish, by name; never samples, logs, pickles or code."""
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*")


def push(
    export: Annotated[
        Path,
        typer.Argument(
            metavar="EXPORT",
            help="The directory of an exported model.",
            callback=takes(PathKind.EXPORT, PathKind.ADAPTER, PathKind.GGUF),
        ),
    ],
    repository: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="On the hub; made if it is not there.")],
    public: Annotated[bool, typer.Option("--public", help="Make a new repository public; default: private.")] = False,  # noqa: FBT002 - typer's way
    overwrite: Annotated[  # noqa: FBT002 - typer's way
        bool, typer.Option("--overwrite", help="Replace files that the repository has with other contents.")
    ] = False,
) -> None:
    """Upload an exported model to the Hugging Face hub, privately, and verify what arrived."""
    if not _REPOSITORY.fullmatch(repository):
        raise UserError(f"{repository} is not the name of a repository. Give OWNER/NAME, for example me/my-model.")
    title = _check_export(export)
    contents, left_out = outgoing_files(export)
    from huggingface_hub import CommitOperationAdd, HfApi, get_token

    if get_token() is None:
        raise UserError(
            "Nobody is logged in to the hub: run `hf auth login`, or set HF_TOKEN to a token that may write."
        )
    api = HfApi(library_name="holdfast")
    with _hub_errors(repository):
        remote_files, head = _what_is_there(api, repository, public=public)
        files = {name: CommitOperationAdd(name, content) for name, content in contents.items()}
        new = {name: file for name, file in files.items() if not _is_same(file, remote_files.get(name))}
        if not overwrite:
            _refuse_overwriting(repository, [name for name in new if name in remote_files])
        typer.echo(f"{export}: {title}, every byte of its weights as it was exported")
        if left_out:
            names = ", ".join(map(escaped, left_out))
            typer.echo(f"left out, since only a model's own files are published: {names}")
        if not new:
            typer.echo(f"{repository} has all {len(files)} files already")
            return
        if head is None:
            api.create_repo(repository, private=not public, exist_ok=False)
            typer.echo(f"{repository} is made, {'public' if public else 'private'}")
        # `upload_folder` would make several commits of large files, and compare the parent of the first one alone.
        commit = api.create_commit(repository, new.values(), commit_message=f"Export of {title}", parent_commit=head)
        size = size_words(sum(file.upload_info.size for file in new.values()))
        typer.echo(f"{len(new)} files, {size}, are commit {commit.oid[:12]}")
        remote_files, _ = _what_is_there(api, repository, public=public, revision=commit.oid)
    _check_arrived(repository, commit.oid, [n for n, file in files.items() if not _is_same(file, remote_files.get(n))])
    typer.echo(f"verified: the hub's hashes of all {len(files)} files are ours. {commit.commit_url}")


def _refuse_overwriting(repository: str, changed: Sequence[str]) -> None:
    if changed:
        raise UserError(
            f"{repository} has other contents under {len(changed)} of the names: {', '.join(changed[:6])}. Nothing was "
            "sent. Give --overwrite to replace them (its history keeps them), or name another repository."
        )


def _check_arrived(repository: str, commit: str, wrong: Sequence[str]) -> None:
    if wrong:
        raise RunStopped(
            f"{repository} does not hold what was sent: {', '.join(wrong)} differ by size or hash at commit "
            f"{commit[:12]}. Push again with --overwrite, and do not load what is there."
        )


def _check_export(export: Path) -> str:
    from holdfast.checkpoint.export.about import ABOUT_FILE, check_weights, read_about
    from holdfast.models.files.places import local_directory

    if not export.exists():
        local_directory(str(export), Path.cwd())  # says whose export it would be
        raise UserError(f"There is no directory {export}. `holdfast checkpoint export` makes an export.")
    exported = read_about(export)
    if exported is None:
        raise UserError(
            f"{export} is not an export of Holdfast: it has no {ABOUT_FILE}. `holdfast checkpoint export` makes one."
        )
    check_weights(export, exported, by_hash=True)
    if exported.proof is None:
        return exported.words
    faults = exported.proof.get("faults")
    if exported.proof.get("is_within") is not True:
        said = "; ".join(map(str, faults)) if isinstance(faults, list) else "it holds no verdict"
        raise UserError(
            f"{export} is not proved, and only what is proved is published: {said}. Export it in another type, or push "
            "the model that transformers reads."
        )
    return f"{exported.words}, proved by {exported.proof.get('program')}"


def outgoing_files(export: Path) -> tuple[dict[str, str | bytes], list[str]]:
    """Return what of an export is uploaded, paths or contents by name, and the names of what stays.

    The configuration goes without what could be secret, and so does what the export says of its parent.
    """
    from holdfast.checkpoint.export.about import ABOUT_FILE
    from holdfast.config.load import EXPORTED_CONFIG
    from holdfast.config.public import public_configuration, public_text
    from holdfast.config.yaml12 import parse_file, to_yaml

    files: dict[str, str | bytes] = {
        path.name: str(path)
        for path in sorted(export.iterdir())
        if path.is_file() and not path.is_symlink() and any(fnmatch(path.name, pattern) for pattern in _ALLOWED)
    }
    if EXPORTED_CONFIG in files:
        values = parse_file(export / EXPORTED_CONFIG).values
        files[EXPORTED_CONFIG] = to_yaml(public_configuration(values)).encode()
    if ABOUT_FILE in files:
        about = read_json(export / ABOUT_FILE)
        if isinstance(parent := about.get("parent"), dict):
            public = {key: public_text(value) for key, value in parent.items() if isinstance(value, str)}
            about["parent"] = parent | public
        files[ABOUT_FILE] = (json.dumps(about, indent=2, sort_keys=True) + "\n").encode()
    return files, sorted(path.name for path in export.iterdir() if path.name not in files)


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


def _is_same(file: Any, remote: Any) -> bool:
    """Return whether the hub holds a file, by its size and the hash that the hub computed."""
    from huggingface_hub.utils.sha import git_hash

    if remote is None or remote.size != file.upload_info.size:
        return False
    if remote.lfs is not None:
        return bool(remote.lfs.sha256 == file.upload_info.sha256.hex())
    with file.as_file() as content:
        return bool(remote.blob_id == git_hash(content.read()))


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
