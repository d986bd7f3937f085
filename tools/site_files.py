"""Puts files that pages link to outside of `docs/` into the site, beside the pages.

On a code host `../examples/grpo_sort.yaml` leads from a page to the file; in the site the file lies in `examples/`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
OUTSIDE = re.compile(r"\]\(\.\./((?:examples|benchmarks)/[^)#]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add every file outside that a page links to."""
    pages = [Path(file.abs_src_path).read_text(encoding="utf-8") for file in files.documentation_pages()]
    for path in sorted({path for page in pages for path in OUTSIDE.findall(page)}):
        files.append(File(path, str(ROOT), config["site_dir"], use_directory_urls=False))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Let links to those files begin at the site's own folder."""
    return OUTSIDE.sub(r"](\1)", markdown)
