"""DPTrainer under FSDP2 with and without ``cpu_offload``, on GPUs: both end at the same weights.

Run by ``torchrun --nproc_per_node=N memory_test/benchmarks/trainer_offload.py``; ends with status 1
if they do not.
"""

from __future__ import annotations

import tempfile

import torch
import transformers

from opacus.integrations.transformers import DPArguments, DPTrainer


def model() -> transformers.PreTrainedModel:
    """A tiny Llama, always the same."""
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=32,
        )
    )


def texts() -> list[dict[str, list[int]]]:
    """Sixteen texts of random tokens."""
    ids = torch.randint(1, 64, (16, 8), generator=torch.Generator().manual_seed(1)).tolist()
    return [{"input_ids": row, "labels": row} for row in ids]


def trained(offload: bool, folder: str) -> dict[str, torch.Tensor]:
    """All weights after two steps."""
    trainer = DPTrainer(
        model(),
        transformers.TrainingArguments(
            folder, per_device_train_batch_size=4, max_steps=2, optim="adamw_torch",
            learning_rate=1e-2, report_to=[], save_strategy="no", disable_tqdm=True,
            train_sampling_strategy="sequential", fsdp=True,
            use_cpu=not torch.cuda.is_available(),
            fsdp_config={"version": 2, "cpu_offload": offload},
        ),
        train_dataset=texts(), data_collator=transformers.default_data_collator,
        privacy=DPArguments(noise_multiplier=0.0, clipping_norm=0.3, poisson_sampling=False),
    )  # fmt: skip
    trainer.train()
    places = {str(p.device) for p in trainer.model.parameters()}
    print(f"cpu_offload={offload}: parameters on {sorted(places)}, mode {trainer._mode}")
    return {n: p.full_tensor().cpu() for n, p in trainer.model.named_parameters()}


def main() -> None:
    """Train both and say whether they agree."""
    with tempfile.TemporaryDirectory() as folder:
        on_gpu, on_cpu = (trained(offload, folder) for offload in (False, True))
    start = dict(model().named_parameters())
    moved = max(float((on_gpu[n] - start[n].detach()).abs().max()) for n in start)
    wrong = max(float((on_gpu[n] - on_cpu[n]).abs().max()) for n in start)
    right = wrong < 1e-4 < moved
    said = f"largest difference {wrong:.2e}, weights moved {moved:.2e}"
    print(f"{'right' if right else 'WRONG'}: {said}")
    if not right:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
