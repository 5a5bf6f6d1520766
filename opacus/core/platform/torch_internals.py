"""The only code that reads private parts of torch; each function has a public fallback."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, FunctionType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from opacus.core.platform.sharded import is_fsdp, is_fsdp_class

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# Holds the flag `_is_profiler_enabled`. It is read at every layer, so not by a function call; if
# this version of torch keeps it elsewhere, there are no profiler ranges without a variable.
profiler_state: Any = torch.autograd.profiler
if not hasattr(profiler_state, "_is_profiler_enabled"):
    profiler_state = SimpleNamespace(_is_profiler_enabled=False)


def reduce_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """Parameter name -> ``reduce_dtype`` of the mixed-precision policy that it is under.

    Parameters without one are left out, and so are all if this version of torch keeps its
    policies elsewhere: gradients are then summed in fp32, which is never less exact.
    """
    return _policy_dtypes(model, "reduce_dtype")


def compute_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """Parameter name -> ``param_dtype`` of the mixed-precision policy that it is under.

    As in :func:`reduce_dtypes`, some or all may be left out: those compute in their own type.
    """
    return _policy_dtypes(model, "param_dtype")


def _policy_dtypes(model: nn.Module, which: str) -> dict[str, torch.dtype]:
    found: dict[str, torch.dtype] = {}
    for name, group, _ in _managed(model):
        dtype = getattr(getattr(group, "mp_policy", None), which, None)
        if dtype is not None:
            found[name] = dtype
    return found


def tensor_parallel_names(model: nn.Module) -> set[str]:
    """Names of the parameters that ``parallelize_module`` split before FSDP2 sharded them.

    Without these private parts a model that is sharded in both ways cannot be recognised:
    its first backward pass then says that it got DTensors.
    """
    return {name for name, _, state in _managed(model) if getattr(state, "is_dtensor", False)}


def managed_names(model: nn.Module) -> set[str] | None:
    """Names of the parameters in FSDP2 units; ``None`` if this version of torch hides them."""
    names = {name for name, _, _ in _managed(model)}
    return names or (None if any(is_fsdp(m) for m in model.modules()) else set())


def gathered_by(model: nn.Module) -> dict[nn.Module, set[str]]:
    """FSDP2's units, and the names in ``model`` of the parameters that each gathers."""
    names = {id(p): n for n, p in model.named_parameters()}
    units = [module for module in model.modules() if is_fsdp_class(type(module))]
    return {unit: {name for name, _, _ in _in_unit(unit, names)} for unit in units}


def gather_in_backward(unit: Any) -> None:
    """Gather a unit's parameters in a backward pass, in whose end FSDP2 reduces their gradients.

    FSDP2 does so itself where a gradient comes to an output of the unit.
    """
    fsdp_state(unit)._pre_backward(None)


def _managed(model: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Each parameter's name, FSDP2's group of it, and FSDP2's state of it."""
    names = {id(p): n for n, p in model.named_parameters()}
    for module in model.modules():
        if is_fsdp(module):
            yield from _in_unit(module, names)


def _in_unit(module: Any, names: dict[int, str]) -> Iterator[tuple[str, Any, Any]]:
    unit = fsdp_state(module)
    for group in groups_of(unit):
        for state in getattr(group, "fsdp_params", ()):
            name = names.get(id(getattr(state, "sharded_param", None)))
            if name is not None:
                yield name, group, state


def groups_of(unit: Any) -> list[Any]:
    """FSDP2's groups of a unit, which its parameters are gathered in."""
    several = getattr(unit, "_fsdp_param_groups", None)  # since torch 2.12
    return [getattr(unit, "_fsdp_param_group", None)] if several is None else list(several)


def as_sharded(local: Tensor, like: DTensor) -> DTensor:
    """This rank's shard of a tensor that lies on the ranks as ``like`` does."""
    return all_sharded([local], [like])[0]


def all_sharded(shards: Sequence[Tensor], likes: Sequence[DTensor]) -> list[DTensor]:
    """:func:`as_sharded` of each.

    ``DTensor.from_local`` does the same, at ten times the cost in Python.
    """
    from torch.distributed.tensor import DTensor

    found = []
    for local, like in zip(shards, likes, strict=True):
        spec: Any = getattr(like, "_spec", None)
        if spec is not None and local.dtype == like.dtype:
            try:
                found.append(DTensor(local, spec, requires_grad=False))
                continue
            except TypeError:  # another version's constructor
                pass
        found.append(_from_local(local, like))
    return found


def parts_like(flat: Tensor, likes: Sequence[Tensor]) -> list[Tensor]:
    """A vector cut into views with the shapes of other tensors, whose elements are as many."""
    cut: Any = getattr(torch._C._nn, "unflatten_dense_tensors", None)
    if cut is not None:
        return list(cut(flat, likes))
    parts = flat.split_with_sizes([like.numel() for like in likes])
    return [part.view(like.shape) for part, like in zip(parts, likes, strict=True)]


def _from_local(local: Tensor, like: DTensor) -> DTensor:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` without its preparations for functorch, which take a third of its time.

    Under a functorch transform the C++ part raises, as ``apply`` does for such functions; ask
    :func:`under_functorch`.
    """
    direct: Callable[..., Any] | None = getattr(
        super(torch.autograd.Function, function), "apply", None
    )
    return function.apply if direct is None else direct


def under_functorch() -> bool:
    """Whether ``vmap``, ``grad`` or the like of ``torch.func`` is running."""
    active = getattr(torch._C, "_are_functorch_transforms_active", None)
    return active is not None and bool(active())


def renumber(handle: Any) -> Any:
    """Give a hook of a module a number that hooks of equal modules have, too.

    ``torch.compile`` makes a graph for each number that it meets: equal layers share one then. In
    a version of torch whose handles are different they do not.

    Returns:
        The handle.
    """
    find, extra = getattr(handle, "hooks_dict_ref", None), getattr(handle, "extra_dict_ref", ())
    hooks = None if find is None else find()
    if not isinstance(hooks, dict) or handle.id not in hooks or not isinstance(extra, tuple):
        return handle
    first, number = next(iter(hooks)) == handle.id, -1
    while number in hooks:
        number -= 1
    for numbered in (hooks, *(ref() for ref in extra)):
        if numbered is not None and handle.id in numbered:
            numbered[number] = numbered.pop(handle.id)
    if first:
        hooks.move_to_end(number, last=False)  # type: ignore[attr-defined]
    handle.id = number
    return handle


# Graphs that blocks of one kind may have, 8 by default. A private one has one with records and one
# without, each for inputs with and without gradients (the first block of a model with adapters),
# of fixed and of varying sizes: with those of evaluation that is more.
MOST_GRAPHS = 32


def prepare_for_graphs(plain: Iterable[type]) -> None:
    """Let ``torch.compile``, if it has been imported, get along with a private model's hooks.

    From now on it uses a graph only for modules with the hooks that it has seen. It leaves this
    out by default: a graph of a model without hooks, or of this one before it got its hooks,
    would be used for the private one too, whose layers would not be seen. Graphs that are there
    already are dropped. Beyond a limit blocks run in eager code: it is raised.

    Args:
        plain: Classes whose methods it is not to compile for their own sake, where they are
            called between graphs: that takes long and gains nothing.
    """
    dynamo: Any = sys.modules.get("torch._dynamo")
    config = getattr(dynamo, "config", None)  # none while it is being imported
    if config is None or not getattr(config, "skip_nnmodule_hook_guards", False):
        return
    config.skip_nnmodule_hook_guards = False
    if hasattr(config, "recompile_limit"):
        config.recompile_limit = max(config.recompile_limit, MOST_GRAPHS)
    dynamo.reset()
    skip: Any = getattr(getattr(dynamo, "convert_frame", None), "skip_code", None)
    if skip is not None:
        skip(outside_graphs(prepare_for_graphs).__code__)  # the one of all that are outside
        skip(number_of_graphs.__code__)
    for kind in plain if skip is not None else ():
        for method in vars(kind).values():
            function = getattr(method, "__func__", method)
            if isinstance(function, FunctionType):
                skip(function.__code__)


def outside_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compiler.disable``, which imports the compiler, when there is one."""
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call


# Hooks that are off for a while: of which module's, the number of the hook, the hook.
TakenOff = list[tuple[Any, int, Any]]


def take_off(handles: Iterable[Any]) -> TakenOff:
    """Take hooks off where they are the module's only ones: such modules are called faster.

    In a version of torch whose handles are different nothing is taken off.
    """
    taken: TakenOff = []
    for handle in handles:
        find = getattr(handle, "hooks_dict_ref", None)
        hooks = None if find is None else find()
        if hooks is not None and len(hooks) == 1 and handle.id in hooks:
            taken.append((hooks, handle.id, hooks.pop(handle.id)))
    return taken


def put_back(taken: TakenOff) -> None:
    """Put hooks back, before those that have been registered meanwhile."""
    while taken:
        hooks, number, hook = taken.pop()
        hooks[number] = hook
        hooks.move_to_end(number, last=False)


def hooks_every_module() -> bool:
    """Whether there are hooks on all modules; also where this version of torch does not say."""
    asked: Any = getattr(nn.modules.module, "_has_any_global_hook", None)
    return asked is None or bool(asked())


def call_instead(module: nn.Module, function: Callable[..., Any]) -> None:
    """Let ``function`` stand for the call of a module, its hooks included.

    As ``Module.compile`` does; copies and pickles of the module are without it.
    """
    module.__dict__["_compiled_call_impl"] = function


def calls_themselves(modules: Iterable[nn.Module]) -> None:
    """After :func:`call_instead`: the modules are called as ever."""
    for module in modules:
        module.__dict__.pop("_compiled_call_impl", None)


def _public_stream_number(device: int) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


# The number of the stream of a GPU in which operations run now; the first is asked faster.
stream_number: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", _public_stream_number
)


# Calls a function when the backward pass that is running has ended, unless by an error.
at_end_of_backward: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback  # type: ignore[attr-defined]
)


def number_of_backward() -> int:
    """A number of the backward pass that is running (a reentrant one has its own)."""
    number = getattr(torch._C, "_current_graph_task_id", None)
    return -1 if number is None else int(number())


# How many nodes of graphs this thread has made so far; always 0 if that is unknown.
number_of_nodes: Callable[[], int] = getattr(torch._C._autograd, "_get_sequence_nr", int)


def number_of_graphs() -> int:
    """How many graphs ``torch.compile`` has made so far, 0 if that is unknown."""
    counters: Any = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return 0 if counters is None else int(counters["stats"]["unique_graphs"])


def roots_of_backward() -> list[Tensor]:
    """The tensors that the running backward pass started from; empty if unknown.

    Looks at the frames of Python: those of this thread, and of the one that waits for it where
    a device has a thread of its own.
    """
    others = sys._current_frames() if hasattr(sys, "_current_frames") else {}
    own = _roots_in(sys._getframe())
    found = [own] if own else [roots for frame in others.values() if (roots := _roots_in(frame))]
    return found[0] if len(found) == 1 else []


def _roots_in(frame: FrameType | None) -> list[Tensor]:
    while frame is not None:
        if frame.f_code.co_name == "_engine_run_backward":
            roots = frame.f_locals.get("t_outputs", ())
            return [root for root in roots if isinstance(root, Tensor)]
        frame = frame.f_back
    return []


def default_store() -> Any:
    """The store that joined the ranks, ``None`` if this version of torch keeps it elsewhere."""
    from torch.distributed import distributed_c10d

    found = getattr(distributed_c10d, "_get_default_store", None)
    return None if found is None else found()


def fsdp_states(model: nn.Module) -> list[Any]:
    """What FSDP2 knows of each unit, in the same order on all ranks.

    A root has a list of them once it has run, which is much shorter than that of all modules.
    """
    own = fsdp_state(model)
    if getattr(own, "_is_root", False):
        states = list(getattr(getattr(own, "_state_ctx", None), "all_states", ()))
        if states:
            return states
    found = dict.fromkeys(map(fsdp_state, model.modules()))  # several modules may have one
    return [state for state in found if state is not None]


def fsdp_state(module: Any) -> Any:
    """What FSDP2 knows of the unit that a module is; ``None`` if it is none."""
    state_of: Any = getattr(module, "_get_fsdp_state", None)
    return None if state_of is None else state_of()


@contextmanager
def reduced_at_once(model: nn.Module) -> Iterator[None]:
    """Let FSDP2 reduce gradients, whatever ``set_requires_gradient_sync`` has said.

    Gradients kept for later would reach parameters in a norm pass and look like a leak.
    """
    flags = ("reduce_grads", "all_reduce_grads")
    before = []
    for state in fsdp_states(model):
        for group in groups_of(state):
            off = [flag for flag in flags if getattr(group, flag, True) is False]
            before += [(group, flag) for flag in off]
    for group, flag in before:
        setattr(group, flag, True)
    try:
        yield
    finally:
        for group, flag in before:
            setattr(group, flag, False)


def accumulator_of(leaf: Tensor) -> Any:
    """The node of a graph that adds to ``leaf.grad``."""
    with torch.enable_grad():
        return torch.autograd.graph.get_gradient_edge(leaf).node


def will_run(node: Any) -> bool:
    """Whether the backward pass that runs now reaches this node.

    ``torch.autograd.grad`` and ``backward(inputs=...)`` run only what their inputs need.
    """
    return bool(torch._C._will_engine_execute_node(node))


def accumulates(leaf: Tensor) -> bool:
    """In a hook of ``leaf``: whether what arrives is added to ``leaf.grad``.

    It is not if ``torch.autograd.grad`` has been asked for it.
    """
    try:
        return will_run(accumulator_of(leaf))
    except RuntimeError:  # torch does not answer for the inputs of autograd.grad
        return False
