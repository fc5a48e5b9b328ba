"""The packages that a machine without a network lacks: downloaded here as wheels, installed there
in a temporary place.
"""

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT = 64 << 20  # bytes that are carried in all: the tree and the wheels
# what an image with torch and transformers has; other versions of these would not fit to those
PRESENT = (
    "torch", "numpy", "triton", "transformers", "accelerate", "safetensors", "tokenizers", "xxhash",
    "typer", "rich", "markdown-it-py", "faiss-gpu-cu12", "gguf", "peft", "jinja2",
)  # fmt: skip
EXTRAS = ("cpu", "gpu", "hf")
GLIBC = (17, 24, 26, 27, 28, 31, 34)  # manylinux_2_N, which pip matches exactly


def wanted(present: Sequence[str]) -> list[str]:
    """Requirements of pyproject.toml, of the package and of what the benchmarks use, that are not
    present.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = list(project["dependencies"])
    for extra in EXTRAS:
        listed += project["optional-dependencies"][extra]
    return [line for line in listed if re.split(r"[^\w.-]", line)[0] not in present]


def download(directory: Path, python: str, present: Sequence[str]) -> str:
    """Wheels of what is wanted into a directory; says what is carried. Exits where pip fails, or it
    is too much.
    """
    directory.mkdir(parents=True, exist_ok=True)
    names = wanted(present)
    platforms = [f"--platform=manylinux_2_{n}_x86_64" for n in GLIBC]
    platforms += ["--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", f"--python-version={python}", "--implementation=cp"]
    command += [*platforms, "--dest", str(directory), *names]
    if subprocess.run(command).returncode:
        sys.exit(f"error: pip could not download {', '.join(names)} for Python {python}")
    sizes = {path.name: path.stat().st_size for path in sorted(directory.glob("*.whl"))}
    tree, total = tree_bytes(directory), sum(sizes.values())
    told = [f"{size / 1e6:8.2f} MB  {name}" for name, size in sizes.items()]
    told += [f"{tree / 1e6:8.2f} MB  the tree", f"{(tree + total) / 1e6:8.2f} MB  in all"]
    if tree + total > LIMIT:
        sys.exit("\n".join([*told, f"error: more than {LIMIT / 1e6:.0f} MB; name more --present"]))
    return "\n".join(told)


def tree_bytes(without: Path) -> int:
    """Bytes of the files that git tracks, or that it does not ignore, outside a directory."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    said = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    paths = (ROOT / name for name in said.split("\0") if name)
    left_out = without.resolve()
    return sum(
        path.lstat().st_size
        for path in paths
        if path.exists() and left_out not in path.resolve().parents
    )


def install(directory: Path) -> None:
    """The wheels of a directory into a temporary place that this process and its children import
    from last: what the machine has stays as it is. Exits where there are none, or pip fails.
    """
    found = sorted(directory.glob("*.whl"))
    if not found:
        sys.exit(f"error: there are no wheels in {directory}; --wheels {directory} downloads them")
    names = {"faiss_cpu": "faiss"}
    missing = [
        wheel
        for wheel in found
        if find_spec(names.get(wheel.name.split("-")[0], wheel.name.split("-")[0])) is None
    ]
    site = tempfile.mkdtemp(prefix="wheels-")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    command += ["--no-compile", "--target", site, *map(str, missing)]
    if missing and subprocess.run(command).returncode:
        sys.exit(f"error: pip could not install the wheels of {directory}")
    sys.path.append(site)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*([before] if before else [os.getcwd()]), site])
