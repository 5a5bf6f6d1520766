"""The plan of a run: proposed, made by make_private, carried by checkpoints, not to be disagreed with."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import opacus
from opacus import CorrelatedNoise, Plan, PrivacyEngine
from opacus.__main__ import main
from opacus.accountants import create_accountant
from opacus.accountants.sampling import TruncatedPoisson, UserRows
from opacus.checkpoints.sharded import Checkpointer

ROWS = 64


class Net(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)


def data() -> TensorDataset:
    return TensorDataset(torch.randn(ROWS, 4), torch.arange(ROWS) % 3)


def private(accountant: str = "pld", **kw: Any) -> tuple[PrivacyEngine, Any]:
    engine, model = PrivacyEngine(accountant=accountant), Net()
    arguments = {"noise_multiplier": 1.0, "max_grad_norm": 0.5, **kw}
    made: Any = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data(), batch_size=16), **arguments,
    )  # fmt: skip
    return engine, made


def step(made: Any, units: bool = False) -> None:
    for batch in made[-1]:
        x, y = batch[:2]
        made[1].zero_grad()
        more: dict[str, Tensor] = {"unit_ids": torch.arange(len(x))} if units else {}
        nn.functional.cross_entropy(made[0](x, **more), y).backward()
        made[1].step()
        return


# --- proposals ---


def test_the_command_line_prints_a_proposal(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--size", "2000", "--epsilon", "4", "--epochs", "5", "--accountant", "rdp"]
    proposal = main(asked)
    shown = capsys.readouterr().out
    assert f"{proposal.noise_multiplier:g}" in shown and "<- chosen" in shown and "arXiv" in shown
    with pytest.raises(SystemExit):
        main([*asked[:2], "--epsilon", "-1", *asked[4:]])
    assert "epsilon" in capsys.readouterr().err


def test_a_proposal_keeps_to_the_budget_and_is_what_runs() -> None:
    plan = opacus.plan(dataset_size=ROWS, target_epsilon=4.0, epochs=5, least_steps=10)
    engine, made = private(plan.accountant, **plan.arguments())
    assert made[1].plan.arguments() == plan.arguments()
    assert made[1].expected_batch_size == plan.expected_batch_size
    assert made[-1].sample_rate == plan.sample_rate
    book = create_accountant(plan.accountant)
    book.history = [(plan.noise_multiplier, plan.sample_rate, plan.steps)]
    assert 3.7 < book.get_epsilon(plan.delta) <= 4.0
    step(made)
    assert engine.accountant.history == [(plan.noise_multiplier, plan.sample_rate, 1)]
    assert str(plan).count("arXiv") >= 4 and "<- chosen" in str(plan)


def test_larger_batches_are_taken_while_they_pay() -> None:
    few = opacus.plan(dataset_size=4000, target_epsilon=8.0, epochs=4, accountant="rdp")
    many = opacus.plan(dataset_size=4000, target_epsilon=8.0, epochs=40, accountant="rdp")
    assert few.steps >= 200 and many.expected_batch_size > few.expected_batch_size
    assert (
        many.noise_multiplier / many.expected_batch_size
        < few.noise_multiplier / few.expected_batch_size
    )
    least = opacus.plan(
        dataset_size=4000, target_epsilon=8.0, epochs=0.5, batch_sizes=[100, 400], accountant="rdp"
    )
    assert least.expected_batch_size == 100 and least.steps == 20
    assert many.delta == 1e-5


@pytest.mark.parametrize(
    "kw", [{"dataset_size": 1}, {"epochs": 0}, {"batch_sizes": [5000]}, {"least_steps": 0}]
)
def test_values_out_of_range(kw: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        opacus.plan(**{"dataset_size": 4000, "target_epsilon": 1.0, "epochs": 1, **kw})


# --- runs ---


@pytest.mark.parametrize(
    "kw",
    [
        {},
        {"max_grad_norm": [0.1, 0.2], "clipping": "per_layer"},
        {"sampling": UserRows(3), "release_grid": 2.0**-10},
        {"max_batch_size": 40, "privacy_unit": "unit_ids", "grad_sample_mode": "hooks"},
        {"correlated_noise": CorrelatedNoise.square_root(2, steps=4, separation=4)},
    ],
)
def test_make_private_makes_a_plan_that_makes_it_again(kw: dict[str, Any]) -> None:
    plan = private(**kw)[1][1].plan
    assert isinstance(plan, Plan) and plan.sample_rate == 0.25 and plan.accountant == "pld"
    assert plan.expected_batch_size == 16
    if "max_batch_size" in kw:
        assert plan.sampling == TruncatedPoisson(ROWS, 40)
    assert private(**plan.arguments())[1][1].plan == plan
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.noise_multiplier = 0.1


def test_the_plan_of_a_run_follows_its_schedules() -> None:
    engine, (_, optimizer, _) = private()
    asked = optimizer.plan
    engine.accountant = create_accountant("rdp")
    optimizer.noise_multiplier, optimizer.max_grad_norm = 0.7, 0.2
    assert (asked.noise_multiplier, asked.max_grad_norm) == (1.0, 0.5)
    assert (optimizer.plan.noise_multiplier, optimizer.plan.max_grad_norm) == (0.7, 0.2)
    assert (asked.accountant, optimizer.plan.accountant) == ("pld", "rdp")
    optimizer = private(max_grad_norm=[0.3, 0.4], clipping="per_layer")[1][1]
    optimizer.max_grad_norm = 1.0  # of the whole gradient, so both double
    assert optimizer.plan.max_grad_norm == pytest.approx((0.6, 0.8))


CHANGES = [
    ({"sampling": UserRows(3)}, "sampling='UserRows'"),
    ({"privacy_unit": "unit_ids"}, "privacy_unit='unit_ids'"),
    ({"max_grad_norm": [0.1, 0.2], "clipping": "per_layer"}, "clipping='per_layer'"),
]


@pytest.mark.parametrize("kw,message", CHANGES)
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_run_of_another_unit_does_not_go_on(
    kind: str, kw: dict[str, Any], message: str, tmp_path: Any
) -> None:
    engine, made = private(**kw)
    step(made, units="privacy_unit" in kw)
    file = io.BytesIO()
    if kind == "file":
        engine.save_checkpoint(path=file, module=made[0], optimizer=made[1])
    else:
        Checkpointer(tmp_path, engine=engine, module=made[0], optimizer=made[1]).save()
    others = [{}, {"sampling": UserRows(4)}] if "sampling" in kw else [{}]
    for arguments, refused in ((kw, False), *((other, True) for other in others)):
        other, again = private(**arguments)
        before = again[0]._module.weight.detach().clone()

        def load(other: Any = other, again: Any = again) -> None:
            file.seek(0)
            if kind == "file":
                other.load_checkpoint(path=file, module=again[0], optimizer=again[1])
            else:
                Checkpointer(tmp_path, engine=other, module=again[0], optimizer=again[1]).load()

        if refused:
            with pytest.raises(
                ValueError, match=message if not arguments else r"rows=3 \(here 4\)"
            ):
                load()
            assert torch.equal(again[0]._module.weight, before) and len(other.accountant) == 0
        else:
            load()
            assert len(other.accountant) == 1


def test_other_rates_and_noise_go_on() -> None:
    """The accountant records those of each step."""
    engine, made = private()
    step(made)
    file = io.BytesIO()
    engine.save_checkpoint(path=file, module=made[0], optimizer=made[1])
    file.seek(0)
    other, again = private(noise_multiplier=2.0, sample_rate=0.5)
    said = r"sample_rate = 0.25 \(now 0.5\), .*noise_multiplier = 1.0 \(now 2.0\)"
    with pytest.warns(UserWarning, match=said):
        other.load_checkpoint(path=file, module=again[0], optimizer=again[1])
    step(again)
    assert other.accountant.history == [(1.0, 0.25, 1), (2.0, 0.5, 1)]
