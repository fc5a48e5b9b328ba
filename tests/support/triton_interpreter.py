"""Triton's interpreter on machines without a CUDA device: import this before Triton, then kernels
run on the CPU.

Four changes to the interpreter of Triton 3.6 to 3.9: the bounds of loops are taken from arrays of
one element in a way that NumPy 2.4 refuses; the language is patched anew at every call of a device
function, which takes half of the time; a comparison of scalars that becomes a mask takes the
scalars' type, which loads of 3.9 refuse; and matrix products of bfloat16, which NumPy does not
have, are made of its bits as if they were whole numbers.
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

    dot = interpreter.InterpreterBuilder.create_dot

    def numbers(x: Any) -> Any:
        if x.dtype.scalar != interpreter.tl.bfloat16:
            return x
        wide = (x.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(wide, interpreter.tl.float32)

    def dot_of_numbers(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, numbers(a), numbers(b), *rest)

    interpreter.InterpreterBuilder.create_dot = dot_of_numbers
    interpreter.InterpreterBuilder.create_splat = splat
    interpreter._patch_lang_tensor = patch_index
    interpreter.GridExecutor.__call__ = launch_anew
    interpreter.InterpretedFunction.__call__ = call
