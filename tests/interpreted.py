"""Triton's interpreter on machines without a CUDA device: import this before Triton, then kernels run on the CPU.

Three changes to the interpreter of Triton 3.6 to 3.9: the bounds of loops are taken from arrays of one element in a way
that NumPy 2.4 refuses; the language is patched anew at every call of a device function, which takes half of the time;
and a comparison of scalars that becomes a mask takes the scalars' type, which loads of 3.9 refuse.
"""

import os
from typing import Any

import numpy as np
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

    def splat(self: Any, shaped: Any, scalar: Any) -> Any:
        value = np.full(shaped.shape, scalar.data.reshape(-1)[0], dtype=scalar.data.dtype)
        return interpreter.TensorHandle(value, scalar.dtype.scalar)

    interpreter.InterpreterBuilder.create_splat = splat
    interpreter._patch_lang_tensor = patch_index
    interpreter.GridExecutor.__call__ = launch_anew
    interpreter.InterpretedFunction.__call__ = call
