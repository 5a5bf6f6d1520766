"""Attributes that have their home in another object."""

from __future__ import annotations

from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class Delegated(Generic[T]):
    """An attribute that is read from, and written to, an object that the owner holds.

    Args:
        holder: Name of the owner's attribute that has the object.
    """

    def __init__(self, holder: str) -> None:
        self._holder = holder

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, owner: None, kind: type) -> Delegated[T]: ...

    @overload
    def __get__(self, owner: object, kind: type) -> T: ...

    def __get__(self, owner: object | None, kind: type) -> Any:
        return self if owner is None else getattr(getattr(owner, self._holder), self._name)

    def __set__(self, owner: object, value: T) -> None:
        setattr(getattr(owner, self._holder), self._name, value)
