"""Triton's interpreter on machines without a CUDA device: import this before Triton, then kernels run on the CPU.

Two changes to Triton 3.6's interpreter: the bounds of loops are taken from arrays of one element in a way that NumPy
2.4 refuses; and the language is patched anew at every call of a device function, which takes half of the time.
"""

import os
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    patch_tensor, launch = interpreter._patch_lang_tensor, interpreter.GridExecutor.__call__
    patched: set[int] = set()  # namespaces, in this launch

    def patch_index(tensor: type, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        launch(self, *args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        namespace = self.fn.__globals__
        if id(namespace) not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(id(namespace))
        return self.rewrite()(*args, **kwargs)

    interpreter._patch_lang_tensor = patch_index
    interpreter.GridExecutor.__call__ = launch_anew
    interpreter.InterpretedFunction.__call__ = call
