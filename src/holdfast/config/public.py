"""What of a configuration may leave a run or its machine, and the reduction of text that can carry a secret."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from holdfast.config.base import LEFT_OUT
from holdfast.files import parse_json
from holdfast.text.escaping import escaped

_FREE_FORM = {"kwargs"}
"""Sections that hold what a user's own code takes; nobody can tell what of it is secret."""
_ADDRESS = re.compile(r"([A-Za-z][\w+.-]*://)(?:[^/@\s]*@)?([^\s?#]*)(?:[?#]\S*)?")
_USER = re.compile(r"(?<=://)[^/@\s]*@")
_HASH = "sha256 "
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")
_CREDENTIAL = re.compile(r"(^|_)(api|key|secret|password|passwd|token|credentials?|auth)(_|$)", re.IGNORECASE)
_LONGEST_NAME = 100


def public_configuration(values: Any) -> Any:
    """Return a configuration without what could be secret: paths become names, addresses their host."""
    if isinstance(values, Mapping):
        return {
            public_text(str(key)): public_configuration(value)
            for key, value in values.items()
            if key not in _FREE_FORM and not (isinstance(value, str) and _CREDENTIAL.search(str(key)))
        }
    if isinstance(values, list):
        return [public_configuration(value) for value in values]
    return public_text(values) if isinstance(values, str) else values


def portable_configuration(values: Any, mark: Callable[[Any], str] = lambda _: LEFT_OUT) -> Any:
    """Return a configuration for exports and checkpoints: without what could be secret, and with paths.

    Who has one may have the files of the run as well, so paths stay and `holdfast eval` finds rows and functions. What
    cannot be told from a secret is marked, so that a configuration without it does not pass for the run's.

    Args:
        values: The configuration.
        mark: Returns what stands in the place of a value.
    """
    if isinstance(values, Mapping):
        return {
            str(key): mark(value)
            if value and (key in _FREE_FORM or _is_secret(key, value)) and not _is_marked(value)
            else portable_configuration(value, mark)
            for key, value in values.items()
        }
    if isinstance(values, list):
        return [portable_configuration(value, mark) for value in values]
    return _without_password(values) if isinstance(values, str) else values


def hashed(text: str) -> str:
    """Return settings in JSON with hashes in the place of what could be secret: equal settings stay equal."""
    try:
        values = parse_json(text)
    except (ValueError, TypeError):  # a path, a hash; or somebody wrote no text at all
        return text
    portable = portable_configuration(values, _hash)
    return text if portable == values else json.dumps(portable, sort_keys=True)


def _hash(value: Any) -> str:
    return _HASH + hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _is_marked(value: Any) -> bool:
    return isinstance(value, str) and value.startswith((LEFT_OUT, _HASH))


def _without_password(text: str) -> str:
    address = _ADDRESS.fullmatch(text)
    return _USER.sub("", text) if address is None else f"{address[1]}{address[2]}"


def _is_secret(key: object, value: object) -> bool:
    if not isinstance(value, str) or not _CREDENTIAL.search(str(key)):
        return False
    return not (str(key).endswith("_variable") and _VARIABLE.fullmatch(value))  # the name of one that holds it


def public_text(text: str) -> str:
    """Return a value that is text, reduced to what names something."""
    if "://" in text:
        try:
            address = urlsplit(text)
            port = f":{address.port}" if address.port else ""
        except ValueError:  # half an address
            return f"(text of {len(text)} characters)"
        return f"{escaped(address.scheme)}://{escaped(address.hostname or '')}{port}"
    if "\n" in text or len(text) > _LONGEST_NAME + 400:
        return f"(text of {len(text)} characters)"
    name = text.rstrip("/\\").replace("\\", "/").rpartition("/")[2].partition("?")[0]
    return escaped(name if len(name) <= _LONGEST_NAME else f"(text of {len(text)} characters)")
