"""Parameters that live in submodules and appear under other names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from opacus.core.record.layers import is_alias

if TYPE_CHECKING:
    _Base = nn.Module
else:
    _Base = object


def filter_out_old_keys(
    self: RenameParamsMixin, state_dict: Mapping[str, Any], prefix: str, local_metadata: Any
) -> dict[str, Any]:
    """``state_dict`` without the entries that go by the old name of a renamed parameter.

    Args:
        self: The module with renamed parameters.
        state_dict: The state dict it is part of.
        prefix: What precedes the module's own keys there.
        local_metadata: Not used; state dict hooks are given it.
    """
    old = {prefix + name for name in self.old_to_new}
    return {key: value for key, value in state_dict.items() if key not in old}


class RenameParamsMixin(_Base):
    """Gives parameters of submodules names of the module's own, as in a state dict to match.

    The module then owns each renamed parameter besides the submodule that uses it:
    ``named_parameters`` and ``state_dict`` show it once, under its new name, and
    setting either one sets the other. State dicts may use new names or old ones.
    Put it before ``nn.Module`` in the bases, and call :meth:`set_rename_map` once the
    submodules are there.

    Attributes:
        old_to_new: Qualified name of a parameter -> its new name.
        new_to_old: The reverse.
    """

    old_to_new: dict[str, str] = {}  # noqa: RUF012 (replaced, never changed)
    new_to_old: dict[str, str] = {}  # noqa: RUF012

    def set_rename_map(self, rename_map: dict[str, str]) -> None:
        """Rename parameters.

        Args:
            rename_map: Qualified name of a submodule's parameter -> new name, without
                dots. Names of parameters that do not exist are passed over.

        Raises:
            ValueError: Two parameters would get the same name.
        """
        if len(set(rename_map.values())) != len(rename_map):
            raise ValueError(f"rename_map gives one name to several parameters: {rename_map}")
        first_call = "new_to_old" not in self.__dict__
        self.old_to_new = dict(rename_map)
        self.new_to_old = {new: old for old, new in rename_map.items()}
        for old, parameter in list(self.named_parameters(remove_duplicate=False)):
            if old in rename_map:
                self.register_parameter(rename_map[old], parameter)
        if first_call:
            self.register_state_dict_post_hook(_show_new_names)
            self.register_load_state_dict_pre_hook(_fill_in_names)
            self.register_load_state_dict_post_hook(_after_load)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """As ``nn.Module.parameters``; without ``recurse`` only those not of a submodule.

        A renamed parameter is used by the submodule, so the gradient rule that applies to
        it is the submodule's.
        """
        for name, parameter in self.named_parameters(recurse=recurse):
            if recurse or name not in self.new_to_old:
                yield parameter

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As ``nn.Module.load_state_dict``; renamed parameters by their new or old name."""
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        old = self.new_to_old.get(name)
        if old is not None and (value is None or isinstance(value, nn.Parameter)):
            owner, local = _owner(self, old)
            setattr(owner, local, value)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)
        if recurse:
            _take_parameters_of_submodules(self)
        return result

    def _require_shared_parameters(self) -> None:
        """Raise if a renamed parameter is no longer the one that its submodule uses."""
        for new, parameter in _used_by_submodules(self):
            if self._parameters[new] is not parameter and not is_alias(parameter):
                raise RuntimeError(
                    f"{type(self).__name__}.{new} is no longer the parameter that "
                    f"'{self.new_to_old[new]}' uses: a submodule was sharded or changed by "
                    f"itself. Apply fully_shard, or whatever did it, to the whole "
                    f"{type(self).__name__}"
                )


def _owner(module: nn.Module, qualified: str) -> tuple[nn.Module, str]:
    path, _, local = qualified.rpartition(".")
    return module.get_submodule(path), local


def _used_by_submodules(module: RenameParamsMixin) -> Iterator[tuple[str, nn.Parameter]]:
    """New name and parameter, for those whose submodule still has it."""
    for new, old in module.new_to_old.items():
        owner, local = _owner(module, old)
        parameter = owner._parameters.get(local)
        if parameter is not None and new in module._parameters:
            yield new, parameter


def _take_parameters_of_submodules(module: RenameParamsMixin) -> None:
    """Share parameters again after each module may have replaced its own."""
    for new, parameter in _used_by_submodules(module):
        module._parameters[new] = parameter


# The hooks are functions of this file, not methods, so that modules can be copied.


def _show_new_names(module: Any, state_dict: Any, prefix: str, local_metadata: Any) -> None:
    kept = filter_out_old_keys(module, state_dict, prefix, local_metadata)
    for key in state_dict.keys() - kept.keys():
        del state_dict[key]


def _fill_in_names(module: Any, state_dict: Any, prefix: str, *_: Any) -> None:
    """Give a parameter found under one of its names the other one too."""
    for new, old in module.new_to_old.items():
        names = prefix + new, prefix + old
        found = next((state_dict[n] for n in names if n in state_dict), None)
        if found is not None:
            state_dict.update(dict.fromkeys(names, found))


def _after_load(module: Any, incompatible_keys: Any) -> None:
    _take_parameters_of_submodules(module)
    missing = incompatible_keys.missing_keys
    for new, old in module.new_to_old.items():
        for key in [k for k in missing if k.endswith(old)]:
            if key.removesuffix(old) + new in missing:
                missing.remove(key)
