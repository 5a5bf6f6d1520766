"""Triton's interpreter, without the work that it does again and again."""

from __future__ import annotations

from typing import Any


def work_once() -> None:
    """Half of the time: each call of a device function patches what its kernel has patched."""
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()

    def once(fn: Any) -> Any:
        place = id(fn.__globals__)
        if place in patched:
            return None  # a device function's; only a launch undoes its patches
        scope = patch(fn)
        if not patched:
            restore = scope.restore
            scope.restore = lambda: (patched.clear(), restore())
        patched.add(place)
        return scope

    interpreter._patch_lang = once
    make, made = interpreter._get_np_dtype, {}

    def once_each(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in made:
            made[name] = make(dtype)
        return made[name]

    interpreter._get_np_dtype = once_each
