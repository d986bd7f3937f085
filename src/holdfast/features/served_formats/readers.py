"""Which program reads an export for its proof, and how it is asked."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from holdfast.errors import UserError
from holdfast.features.served_formats.proof import NEW_TOKENS, Answer, answers_of
from holdfast.features.served_formats.rows import ProofRow

_PROGRAMS = {"gguf": ("llama", "llama_cpp"), "compressed-tensors": ("vllm", "vllm")}
"""Format to the script below `programs` and the module that it imports."""


def check_reader(python: Path | None) -> None:
    """Refuse an interpreter that is not there.

    Raises:
        UserError: It cannot be started.
    """
    if python is not None and shutil.which(str(python)) is None:
        raise UserError(f"--reader {python}: there is no such interpreter. Nothing was written.")


def read_by_another(
    form: str, path: Path, rows: Sequence[ProofRow], python: Path | None, plain: Path
) -> tuple[str, list[Answer]]:
    """Return the name of a program that is not ours, and its answers.

    Args:
        form: "gguf" or "compressed-tensors".
        path: The GGUF file, or the directory.
        rows: To answer.
        python: An interpreter with llama-cpp-python or vLLM; None takes this one if it has it, and otherwise plain
            transformers, which unpacks the weights by the format's own package.
        plain: The model directory that the export was made of.

    Raises:
        UserError: The program ended without an answer.
    """
    script, module = _PROGRAMS[form]
    if python is None and importlib.util.find_spec(module) is None:
        return _by_transformers(form, path, rows, plain)
    interpreter = sys.executable if python is None else str(python)
    request = {
        "model": str(path),
        "threads": torch.get_num_threads(),
        "rows": [row.request(NEW_TOKENS) for row in rows],
    }
    with tempfile.TemporaryDirectory(prefix="holdfast-proof-") as folder:
        answer = Path(folder) / "answer.json"
        command = [interpreter, "-I", str(Path(__file__).parent / "programs" / f"{script}.py"), str(answer)]
        done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, check=False)
        if done.returncode or not answer.exists():
            lines = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()
            raise UserError(
                f"{interpreter} ended with code {done.returncode} over {path.name} and answered nothing: {lines[-1]}. "
                "Nothing was written. Try another --reader."
            )
        written = json.loads(answer.read_text(encoding="utf-8"))
    return written["program"], [Answer(**row) for row in written["rows"]]


def _by_transformers(form: str, path: Path, rows: Sequence[ProofRow], plain: Path) -> tuple[str, list[Answer]]:
    """Return what plain transformers answers with the weights that the format's own package unpacks."""
    import transformers

    name = f"transformers {transformers.__version__} with {form} {version(form)}"
    if form != "gguf":
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        return name, answers_of(plain_model(path), tokenizer, rows)
    from holdfast.features.served_formats.gguf_file import read_gguf

    tokenizer = transformers.AutoTokenizer.from_pretrained(plain)
    model = plain_model(plain)
    tensors, tokenizer.chat_template = read_gguf(path, model.config, model.state_dict())
    model.load_state_dict(tensors, strict=False)
    return f"{name} (its tokenizer was not run)", answers_of(model, tokenizer, rows)


def plain_model(directory: Path) -> Any:
    """Return a model as plain transformers loads it, in float32."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model.eval()
