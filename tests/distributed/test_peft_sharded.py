"""PEFT's adapters under FSDP2 on two ranks: the clipped mean is that of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from opacus import PrivacyEngine
from opacus.utils.fsdp_utils import FSDP2Wrapper
from tests.helpers.adapters import CONFIGS, TokenLoss, adapted, logits
from tests.helpers.distributed import progress, run_distributed
from tests.helpers.oracle import clipped_sum, norms, per_sample_gradients, trainable
from tests.integrations.tiny import VOCABULARY

PARTS = (slice(0, 2), slice(2, 3))  # the second rank has one sample
MODES = ("ghost_fsdp", "ghost_fsdp_bk")
KINDS = list(CONFIGS)


def made(kind: str) -> Any:
    return adapted(CONFIGS[kind]()).double().train()


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(1, VOCABULARY, (3, 5), generator=torch.Generator().manual_seed(3))
    return ids, ids.roll(1, 1)


def wanted(kind: str) -> tuple[float, dict[str, torch.Tensor]]:
    """A clipping norm that clips every sample, and the clipped mean."""
    rows = per_sample_gradients(
        made(kind), lambda m, batch: TokenLoss()(logits(m, batch[0]), batch[1]), texts()
    )
    c = float(norms(rows).min()) / 2
    return c, {name: total / 3 for name, total in clipped_sum(rows, c).items()}


def sums_of_rank(rank: int, _: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for number, kind in enumerate(KINDS):
        progress(kind)
        model = made(kind)
        c, _ = wanted(kind)
        names, parameters = trainable(FSDP2Wrapper(model))
        x, y = (t[PARTS[rank]] for t in texts())
        data = torch.utils.data.TensorDataset(*texts())
        wrapped, optimizer, loss, _ = PrivacyEngine().make_private(
            module=model, optimizer=torch.optim.SGD(parameters, lr=0.0), criterion=TokenLoss(),
            data_loader=torch.utils.data.DataLoader(data, batch_size=3), noise_multiplier=0.0,
            max_grad_norm=c, poisson_sampling=False, expected_batch_size=3,
            grad_sample_mode=MODES[number % 2],
        )  # fmt: skip
        loss(logits(wrapped, x), y).backward()
        optimizer.step()
        results[kind] = {n: p.grad.full_tensor() for n, p in zip(names, parameters, strict=True)}
    return results


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_two_ranks_give_the_sum_of_all_samples() -> None:
    for rank in run_distributed(sums_of_rank, 2):
        for kind in KINDS:
            c, want = wanted(kind)
            for name, grad in rank[kind].items():
                torch.testing.assert_close(grad, want[name], rtol=1e-6, atol=1e-6 * c, msg=kind)


# --- a quantised base ---


def quantised() -> Any:
    """Adapters in fp32 on int8 weights."""
    import peft
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    from tests.integrations.tiny import llama

    model: Any = llama()
    quantize_(model.model, Int8WeightOnlyConfig())
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    torch.manual_seed(2)
    for parameter in trainable(model)[1]:
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model.train()


def wanted_quantised() -> tuple[float, dict[str, torch.Tensor]]:
    """As :func:`wanted`, but the base has no float64."""
    model = quantised()
    names, parameters = trainable(model)
    rows = [
        torch.autograd.grad(TokenLoss()(logits(model, x[None]), y[None]), parameters)
        for x, y in zip(*texts(), strict=True)
    ]
    lengths = [float(torch.cat([g.flatten() for g in row]).norm()) for row in rows]
    c = min(lengths) / 2
    sums = [
        sum(c / n * row[i] for n, row in zip(lengths, rows, strict=True)) / 3
        for i in range(len(names))
    ]
    return c, dict(zip(names, sums, strict=True))


def quantised_sums(rank: int, _: int) -> dict[str, Any]:
    c, _ = wanted_quantised()
    results = {}
    for mode in MODES:
        progress(f"quantised, {mode}")
        model = quantised()
        names, parameters = trainable(FSDP2Wrapper(model))
        x, y = (t[PARTS[rank]] for t in texts())
        data = torch.utils.data.TensorDataset(*texts())
        wrapped, optimizer, loss, _ = PrivacyEngine().make_private(
            module=model, optimizer=torch.optim.SGD(parameters, lr=0.0), criterion=TokenLoss(),
            data_loader=torch.utils.data.DataLoader(data, batch_size=3), noise_multiplier=0.0,
            max_grad_norm=c, poisson_sampling=False, expected_batch_size=3, grad_sample_mode=mode,
        )  # fmt: skip
        loss(logits(wrapped, x), y).backward()
        optimizer.step()
        grads = zip(names, parameters, strict=True)
        results[mode] = {n: p.grad.full_tensor() for n, p in grads}
    return results


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_adapters_of_a_quantised_base_on_two_ranks() -> None:
    """torchao's int8 weights cannot be sharded, so each rank holds them whole."""
    pytest.importorskip("torchao")
    c, want = wanted_quantised()
    for rank in run_distributed(quantised_sums, 2):
        for mode in MODES:
            assert rank[mode].keys() == want.keys()
            for name, grad in rank[mode].items():
                torch.testing.assert_close(grad, want[name], rtol=1e-3, atol=1e-5 * c, msg=mode)
