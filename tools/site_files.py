"""Puts files that pages link to outside of `docs/` into the site, beside the pages.

On a code host `../examples/grpo_sort.yaml` leads from a page to the file; in the site the file lies in `examples/`.
Other files of the repository stay on the code host, so links to them lead there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\(((?:\.\./)+)([^)#]*)(#[^)]*)?\)")
"""A link that leaves its folder: the folders that it goes up, the path from there, and an anchor."""
COPIED = re.compile(r"(examples|benchmarks)/.*\.(?!md$)\w+")


def leaving(page: File, markdown: str) -> Iterator[tuple[re.Match[str], str]]:
    """Yield each link of a page that leads out of `docs/`, with its path in the repository."""
    depth = page.src_uri.count("/")
    yield from ((link, link[2]) for link in LINK.finditer(markdown) if link[1].count("/") == depth + 1)


def on_files(files: Any, config: Any) -> Any:
    """Add every file outside that a page links to."""
    pages = [(page, Path(page.abs_src_path).read_text(encoding="utf-8")) for page in files.documentation_pages()]
    linked = {path for page, text in pages for _, path in leaving(page, text) if COPIED.fullmatch(path)}
    for path in sorted(linked):
        files.append(File(path, str(ROOT), config["site_dir"], use_directory_urls=False))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Let links to copied files begin at the site's own folder, and others lead to the code host."""
    for link, path in reversed(list(leaving(page.file, markdown))):
        inside = "../" * page.file.src_uri.count("/") + path
        target = inside if COPIED.fullmatch(path) else f"{config['repo_url'].rstrip('/')}/blob/main/{path}"
        markdown = f"{markdown[: link.start()]}]({target}{link[3] or ''}){markdown[link.end() :]}"
    return markdown
