"""The guarantee of a trained model, for its model card."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

START, END = "<!-- privacy guarantee -->", "<!-- end of privacy guarantee -->"


@dataclass(frozen=True)
class Guarantee:
    """The guarantee of a run, and how it was obtained.

    Attributes:
        epsilon, delta: Of all steps taken.
        steps: Number of steps.
        examples: Size of the training set.
        expected_batch: Expected examples of a step, of all processes.
        sigma: Noise multiplier.
        clipping_norm: C.
        unit: The protected unit.
        mode: How gradients were clipped.
        accountant: How epsilon was counted.
        poisson: Whether examples were drawn as the accountant assumes.
        seeded: Whether the noise came from a seed.
        norms_logged: Whether gradient norms were logged.
    """

    epsilon: float
    delta: float
    steps: int
    examples: int
    expected_batch: int
    sigma: float
    clipping_norm: float
    unit: str
    mode: str
    accountant: str
    poisson: bool
    seeded: bool
    norms_logged: bool

    @property
    def _are(self) -> str:
        return "are" if self.poisson else "are **not proven** to be"

    def text(self) -> str:
        """A section of a model card, in Markdown."""
        sampling = (
            f"Poisson, rate {self.expected_batch / self.examples:.6g} ({self.expected_batch} of "
            f"{self.examples} expected a step)"
            if self.poisson
            else f"**not Poisson** (batches of {self.expected_batch} of {self.examples}): epsilon "
            "assumes Poisson sampling, so it is not proven for this run"
        )
        lines = [
            "## Differential privacy",
            "",
            f"The weights {self._are} ({self.epsilon:.4g}, {self.delta:.3g})-differentially "
            f"private with respect to the training set, by adding or removing one {self.unit}.",
            "",
            "| | |",
            "|---|---|",
            f"| epsilon | {self.epsilon:.4g} |",
            f"| delta | {self.delta:.3g} |",
            f"| privacy unit | {self.unit} |",
            f"| accountant | {self.accountant}, {self.steps} steps |",
            f"| sampling | {sampling} |",
            f"| noise multiplier | {self.sigma:.6g} |",
            f"| clipping norm | {self.clipping_norm:g}, flat, mode `{self.mode}` |",
            "",
            "Not covered: the weights and the tokenizer that training started from, the choice of "
            "hyperparameters by runs on the same data, evaluation sets, and what was logged "
            "(training loss, numbers of tokens and floating-point operations), which is exact.",
        ]
        if self.norms_logged:
            lines.append(
                "Quantiles of gradient norms were logged without noise: keep the logs secret."
            )
        if self.seeded:
            lines.append("The noise came from a seed: whoever knows it can remove the noise.")
        return "\n".join([START, *lines, END, ""])

    def write(self, folder: str) -> None:
        """Put the section into the folder's ``README.md``, in the place of an earlier one."""
        path = Path(folder) / "README.md"
        before = path.read_text(encoding="utf-8") if path.is_file() else ""
        if START in before and END in before:
            head, rest = before.split(START, 1)
            tail = rest.split(END, 1)[1].lstrip("\n")
            text = head + self.text() + tail
        else:
            text = before + ("\n" if before else "") + self.text()
        path.write_text(text, encoding="utf-8")
