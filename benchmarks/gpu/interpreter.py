"""Imported before Triton, this has kernels run on the CPU, as the tests have them run: where no
kernel can run on a device.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

if find_spec("triton") is not None:
    sys.path.append(str(Path(__file__).parents[2] / "tests"))
    import_module("support.triton_interpreter")
