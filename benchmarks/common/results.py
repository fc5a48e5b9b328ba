"""Writing results: --out as JSON, with options and machine."""

import argparse
import json
import os
import platform
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import torch


def machine() -> dict[str, Any]:
    """Where the numbers come from."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if "model name" in line]
    asked = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(asked, cwd=Path(__file__).parent, capture_output=True, text=True).stdout
    return {
        "cpu": names[0] if names else platform.processor(),
        "cpus": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load": [round(x, 2) for x in os.getloadavg()],
        "commit": commit.strip() or None,
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def write(options: argparse.Namespace, content: dict[str, Any]) -> None:
    """Write the file of --out, if there is one: options and machine, then the content."""
    if options.out is not None:
        _save(options.out, {"options": given(options), "machine": machine(), **content})


def write_part(options: argparse.Namespace, part: str, found: Any) -> None:
    """Write one part of --out, if asked for; what other scripts wrote there stays."""
    if options.out is not None:
        content = json.loads(options.out.read_text()) if options.out.exists() else {}
        content[part] = {"options": given(options), "machine": machine(), "found": found}
        _save(options.out, content)


def given(options: argparse.Namespace) -> dict[str, Any]:
    """The options as JSON has them; of paths only the names."""

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(item) for item in value]
        if isinstance(value, Path):
            return value.name
        return str(value) if isinstance(value, torch.device | torch.dtype) else value

    values = {name: plain(value) for name, value in vars(options).items()}
    if "text" in values:
        values["text"] = [Path(text).name for text in values["text"] or ()]
    return values


_LIST = re.compile(r"\[\n\s*([^][{}]*)\n\s*\]")  # that holds no other, nor a bracket in a string


def _on_a_line(found: re.Match[str]) -> str:
    return "[" + re.sub(r"\n\s*", " ", found[1]) + "]"


def _save(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_LIST.sub(_on_a_line, json.dumps(content, indent=1)))
    print(f"\nwritten: {path}")
