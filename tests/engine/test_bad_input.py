"""Bad input is refused with an error that names it, before anything changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from opacus import PrivacyEngine
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.grad_sample import GradSampleHooks
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import deferred_from_environment
from opacus.validators.errors import UnsupportedModuleError
from tests.helpers.refusals import arguments, assert_untouched


@pytest.mark.parametrize(
    "changes,error,message",
    [
        ({"noise_multiplier": -1.0}, ValueError, "noise_multiplier"),
        ({"noise_multiplier": float("nan")}, ValueError, "noise_multiplier"),
        ({"noise_multiplier": None}, TypeError, "noise_multiplier must be a number"),
        ({"max_grad_norm": 0.0}, ValueError, "max_grad_norm"),
        ({"max_grad_norm": "1"}, TypeError, "max_grad_norm must be a number"),
        ({"max_grad_norm": [1.0, 2.0]}, ValueError, "max_grad_norm"),
        ({"loss_reduction": "none"}, ValueError, "loss_reduction"),
        ({"grad_sample_mode": "gost"}, ValueError, "ghost_fsdp"),
        ({"clipping": "flatt"}, ValueError, "per_layer"),
        ({"clipping": "adaptive"}, TypeError, "needs unclipped_num_std"),
        ({"noise_multipler": 2.0}, TypeError, "did you mean 'noise_multiplier'"),
        ({"defered_norm": True}, TypeError, "did you mean 'deferred_norm'"),
        ({"generator": torch.Generator()}, TypeError, "did you mean 'noise_generator'"),
        *(
            (
                {"clipping": "per_layer", "max_grad_norm": [0.1] * 5, "grad_sample_mode": mode},
                ValueError,
                "each of the 4 trainable parameters, got 5",
            )
            for mode in ("hooks", "ghost", "ghost_bk")
        ),
        ({"posson_sampling": False}, TypeError, "posson_sampling"),
        ({"criterion": None, "grad_sample_mode": "ghost_bk"}, ValueError, "needs the criterion"),
        ({"poisson_sampling": "false"}, TypeError, "poisson_sampling must be True or False"),
        ({"batch_first": "no"}, TypeError, "batch_first must be True or False"),
        ({"deferred_norm": "yes"}, TypeError, "deferred_norm must be True or False"),
        ({"sample_rate": "0.1"}, TypeError, "sample_rate must be a number"),
        ({"expected_batch_size": "64"}, TypeError, "expected_batch_size must be a number"),
        ({"release_grid": "x"}, TypeError, "release_grid must be a number"),
        ({"noise_generator": 42}, ValueError, "must be a torch.Generator"),
        ({"data_loader": TensorDataset(torch.zeros(8, 4))}, ValueError, "is a TensorDataset"),
        ({"grad_sample_mode": "ghost_fsdp"}, ValueError, "process group"),
        (
            {"module": nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))},
            UnsupportedModuleError,
            "1",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refused_before_anything_changes(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    given = arguments(**changes)
    with pytest.raises(error, match=message):
        PrivacyEngine().make_private(**given)
    assert_untouched(given["module"])


def test_no_trainable_parameters() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameters"):
        PrivacyEngine().make_private(**arguments(module=model, optimizer=optimizer))


def test_a_function_is_no_module() -> None:
    with pytest.raises(ValueError, match=r"must be a torch\.nn\.Module, got a function"):
        PrivacyEngine().make_private(**{**arguments(), "module": lambda x: x})


def test_a_lazy_layer_has_to_run_first() -> None:
    model = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(ValueError, match=r"'0\.weight'.* run the module once"):
        PrivacyEngine().make_private(**arguments(module=model))


def test_norms_before_the_first_backward_say_what_is_missing() -> None:
    model = PrivacyEngine().make_private(**arguments(grad_sample_mode="ghost"))[0]
    with pytest.raises(AttributeError, match=r"run the criterion's loss\.backward\(\) first"):
        model.per_sample_gradient_norms  # noqa: B018
    model = PrivacyEngine().make_private(**arguments(grad_sample_mode="ghost_bk"))[0]
    assert "Nothing has been planned yet" in model.explain()


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "no_op", "ghost"])
@pytest.mark.parametrize("wrap_model", [True, False])
def test_settings_of_other_modes(mode: str, wrap_model: bool) -> None:
    wraps = wrap_model or mode == "ew"
    given = arguments(grad_sample_mode=mode, wrap_model=wraps)
    model = PrivacyEngine().make_private(**given)[0]
    wanted = {"held_budget": 1 << 20, "stored_dtype": "float8", "host_budget": 1}
    said = "only the _bk modes keep"
    if mode != "ghost":
        wanted |= {"memory_budget": 0.5, "deferred_norm_budget": 1}
        said += "|only ghost modes defer norms"
    for name, value in wanted.items():
        with pytest.raises(ValueError, match=f"{name}: ({said})"):
            setattr(model, name, value)
    for name in ("held_budget", "memory_budget", "deferred_norm_budget"):
        setattr(model, name, None)
        assert getattr(model, name, None) is None


@pytest.mark.parametrize("share", [2.0, 1.5e9, -0.5, 0.0, float("nan")])
def test_a_share_of_more_than_the_card(share: float) -> None:
    model = PrivacyEngine().make_private(**arguments(grad_sample_mode="ghost_bk"))[0]
    with pytest.raises(ValueError, match=r"int, of bytes, or a float in \(0, 1\].* = int\(40e9\)"):
        model.memory_budget = share
    assert model.memory_budget is None


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (
            lambda layer: {layer.scale: torch.ones(3, 4)},
            r"\(3, 4\) for 'scale': it must be \(5, 4\)",
        ),
        (lambda layer: {layer.scale: torch.ones(5, 1)}, r"it must be \(5, 4\)"),
        (lambda layer: {nn.Parameter(torch.ones(4)): torch.ones(5, 4)}, "does not own"),
    ],
)
@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
def test_a_registered_sampler_that_returns_something_else(
    mode: str, returned: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(GradSampleHooks.GRAD_SAMPLERS, Scaled, lambda layer, *_: returned(layer))
    model = nn.Sequential(Scaled(), nn.Linear(4, 2))
    made = PrivacyEngine().make_private(**arguments(module=model, grad_sample_mode=mode))
    criterion = made[2] if len(made) == 4 else nn.CrossEntropyLoss()
    with pytest.raises(ValueError, match=message):
        criterion(made[0](torch.randn(5, 4)), torch.zeros(5, dtype=torch.long)).backward()


@pytest.mark.parametrize("mode", ["ghost", "ghost_bk"])
def test_a_second_step_is_named(mode: str) -> None:
    made = PrivacyEngine().make_private(**arguments(grad_sample_mode=mode, poisson_sampling=False))
    made[2](made[0](torch.randn(4, 4)), torch.zeros(4, dtype=torch.long)).backward()
    made[1].step()
    with pytest.raises(RuntimeError, match=r"A second step\(\) needs another backward"):
        made[1].step()


def test_adaptive_clipping_asks_for_the_noise_of_the_count_alone() -> None:
    given = arguments(clipping="adaptive", unclipped_num_std=5.0)
    optimizer = PrivacyEngine().make_private(**given)[1]
    assert (optimizer.target_unclipped_quantile, optimizer.clipbound_learning_rate) == (0.5, 0.2)
    assert (optimizer.min_clipbound, optimizer.max_clipbound) == (1, 1e8)
    assert optimizer._privacy.count_noise_std == 5.0  # and the gradient pays for it


def test_optimizer_of_another_model() -> None:
    other = torch.optim.SGD(nn.Linear(4, 2).parameters(), lr=0.1)
    given = arguments(optimizer=other)
    with pytest.raises(ValueError, match="optimizer Parameters"):
        PrivacyEngine().make_private(**given)
    assert_untouched(given["module"])


def test_making_private_twice_says_how_to_start_over() -> None:
    given = arguments()
    model, optimizer, _ = PrivacyEngine().make_private(**given)
    with pytest.raises(ValueError, match="to_standard_module"):
        PrivacyEngine().make_private(**{**given, "module": model})
    with pytest.raises(ValueError, match="original_optimizer"):
        PrivacyEngine().make_private(**{**given, "optimizer": optimizer})
    with pytest.raises(ValueError, match="hooks twice"):
        PrivacyEngine().make_private(**given)
    plain = model.to_standard_module()
    assert plain is given["module"]
    PrivacyEngine().make_private(**given)


def test_secure_mode_refuses_a_seed() -> None:
    given = arguments(noise_generator=torch.Generator())
    with pytest.raises(ValueError, match="noise_generator"):
        PrivacyEngine(secure_mode=True).make_private(**given)


@pytest.mark.parametrize("value", ["yes", "2", "", "true"])
def test_environment_variable_is_0_or_1(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPACUS_USE_DEFERRED_NORM", value)
    with pytest.raises(ValueError, match="OPACUS_USE_DEFERRED_NORM must be 0 or 1"):
        deferred_from_environment()


@pytest.mark.parametrize("value,wanted", [("0", False), ("1", True), (None, False)])
def test_argument_wins_over_environment(
    value: str | None, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if value is not None:
        monkeypatch.setenv("OPACUS_USE_DEFERRED_NORM", value)
    model = PrivacyEngine().make_private(**arguments(grad_sample_mode="ghost"))[0]
    assert model._use_deferred_norm is wanted
    given = arguments(grad_sample_mode="ghost", deferred_norm=not wanted)
    assert PrivacyEngine().make_private(**given)[0]._use_deferred_norm is not wanted


def test_a_loss_that_mixes_samples_is_refused() -> None:
    given = arguments(grad_sample_mode="ghost", criterion=lambda x, y: (x.sum(1) - y).abs().mean())
    model, _, criterion, _ = PrivacyEngine().make_private(**given)
    with pytest.raises(ValueError, match="one loss for the whole batch"):
        criterion(model(torch.randn(4, 4)), torch.zeros(4))


def test_criterion_is_restored_after_an_error() -> None:
    loss = nn.CrossEntropyLoss()
    model, _, criterion, _ = PrivacyEngine().make_private(
        **arguments(grad_sample_mode="ghost", criterion=loss)
    )
    with pytest.raises((RuntimeError, IndexError, ValueError)):
        criterion(model(torch.randn(4, 4)), torch.full((4,), 9))
    assert loss.reduction == "mean"


def test_second_backward_under_poisson_sampling_is_refused() -> None:
    for mode in ("hooks", "ghost"):
        out = PrivacyEngine().make_private(**arguments(grad_sample_mode=mode))
        loss_fn = out[2] if len(out) == 4 else nn.CrossEntropyLoss()
        x, y = torch.randn(4, 4), torch.zeros(4, dtype=torch.long)
        loss_fn(out[0](x), y).backward()
        with pytest.raises(ValueError, match="Poisson"):
            loss_fn(out[0](x), y).backward()


def test_tensor_parallel_mode_refuses_replicas() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = DifferentiallyPrivateDistributedDataParallel(nn.Linear(3, 2))
        given = arguments(grad_sample_mode="ghost_tp")
        given |= {"module": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
        with pytest.raises(ValueError, match="ghost_tp sums no gradients over replicas"):
            PrivacyEngine().make_private(**given)
    finally:
        dist.destroy_process_group()
