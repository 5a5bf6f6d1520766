"""Scenarios: private training on the same seeds, clipped sums, noise, adaptive clipping."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from opacus import PrivacyEngine
from tests.helpers import problems


class Text(nn.Module):
    """A head over embedded tokens that may share their table."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.mlp = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU())
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.mlp(self.tokens(ids)))


SAMPLES, BATCH, STEPS = 24, 8, 4
CLIP = 0.3  # below the norm of every sample's gradient
# The language models of tests/helpers/problems.py have one table for all samples, which Opacus refuses.
PROBLEMS = {
    **{name: problems.PROBLEMS[name] for name in ("mlp", "frozen", "channels", "own_parameters")},
    **{
        name: replace(problems.PROBLEMS["language"], model=partial(Text, tied))
        for name, tied in (("text", False), ("text_tied", True))
    },
}
Private = tuple[PrivacyEngine, Any, Any, Any, Any]  # engine, module, optimizer, criterion, loader


def build(problem: str) -> nn.Module:
    torch.manual_seed(0)
    return PROBLEMS[problem].model()


def data(problem: str) -> TensorDataset:
    inputs, targets = PROBLEMS[problem].batch(SAMPLES)
    return TensorDataset(inputs, targets)


def private(problem: str, mode: str, **options: Any) -> Private:
    """A private model in float32, with its loader and criterion."""
    torch.manual_seed(3)
    engine = PrivacyEngine(accountant="rdp")
    module = build(problem)
    arguments: dict[str, Any] = {
        "noise_multiplier": 0.0,
        "max_grad_norm": CLIP,
        "poisson_sampling": False,
        "loss_reduction": "mean",
        **options,
    }
    loss_fn: Any = PROBLEMS[problem].criterion(reduction=arguments["loss_reduction"])
    made = engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9),
        criterion=loss_fn,
        data_loader=DataLoader(data(problem), batch_size=BATCH),
        grad_sample_mode=mode,
        **arguments,
    )
    private_loss = made[2] if len(made) == 4 else loss_fn
    return engine, made[0], made[1], private_loss, made[-1]


def step(run: Private, batch: list[Tensor]) -> None:
    _, module, optimizer, loss_fn, _ = run
    optimizer.zero_grad()
    loss_fn(module(batch[0]), batch[1]).backward()
    optimizer.step()


def values(module: nn.Module) -> dict[str, Tensor]:
    return {
        name.removeprefix("_module."): p.detach().clone() for name, p in module.named_parameters()
    }


def train(problem: str, mode: str, **options: Any) -> dict[str, Any]:
    """Batch sizes, the clipped sum of the first batch, the model in the end, the history."""
    run = private(problem, mode, **options)
    engine, module, optimizer, _, loader = run
    sizes: list[int] = []
    first: list[Tensor] = []
    reduction = options.get("loss_reduction", "mean")
    while len(sizes) < STEPS:
        for batch in loader:
            step(run, batch)
            sizes.append(len(batch[0]))
            if not first:
                scale = optimizer.expected_batch_size if reduction == "mean" else 1
                first = [p.grad * scale for p in module.parameters() if p.requires_grad]
    return {
        "sizes": sizes,
        "sum": first,
        "model": values(module),
        "history": engine.accountant.history,
    }


def noise(mode: str) -> dict[str, float]:
    """Mean and standard deviation of the noise on the sum of gradients."""
    torch.manual_seed(0)
    module = nn.Linear(200, 200, bias=False)
    dataset = TensorDataset(torch.randn(BATCH, 200), torch.randint(0, 200, (BATCH,)))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    made = PrivacyEngine().make_private(
        module=module,
        optimizer=optimizer,
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(dataset, batch_size=BATCH),
        noise_multiplier=1.7,
        max_grad_norm=0.4,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    loss_fn = made[2] if len(made) == 4 else nn.CrossEntropyLoss()
    step((PrivacyEngine(), made[0], made[1], loss_fn, made[-1]), list(dataset[:]))
    drawn = module.weight.grad * BATCH - module.weight.summed_grad
    return {"mean": float(drawn.mean()), "std": float(drawn.std())}


def adaptive() -> dict[str, list[float]]:
    """The clipping norms that AdaClip goes through."""
    options: dict[str, Any] = {
        "clipping": "adaptive",
        "noise_multiplier": 1e-6,  # the noise of the two differs: ours comes from counters
        "target_unclipped_quantile": 0.5,
        "clipbound_learning_rate": 0.4,
        "max_clipbound": 50.0,
        "min_clipbound": 0.01,
        "unclipped_num_std": 1e-6,
    }
    run = private("mlp", "hooks", **options)
    norms = []
    for batch in [*run[4]] * 4:
        step(run, batch)
        norms.append(float(run[2].max_grad_norm))
    return {"norms": norms}


RUNS: dict[str, Any] = {}
for problem in PROBLEMS:
    for mode in ("hooks", "functorch", "ghost"):
        if (problem, mode) != ("text_tied", "ghost"):  # refused by Opacus
            RUNS[f"train-{problem}-{mode}"] = partial(train, problem, mode)
for mode in ("hooks", "ghost"):
    RUNS[f"train-sum-{mode}"] = partial(train, "mlp", mode, loss_reduction="sum")
    RUNS[f"noise-{mode}"] = partial(noise, mode)
    RUNS[f"train-plain_clip-{mode}"] = partial(train, "mlp", mode, max_grad_norm=1e6)
RUNS["train-ew"] = partial(train, "mlp", "ew")
for mode in ("hooks", "functorch"):
    RUNS[f"train-per_layer-{mode}"] = partial(
        train, "mlp", mode, clipping="per_layer", max_grad_norm=[0.1, 0.2, 0.3]
    )
RUNS["adaptive"] = adaptive
