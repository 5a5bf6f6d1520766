"""What the isolation check says."""

from __future__ import annotations

from torch import nn

from opacus.core.isolation.probe import Difference

ELSEWHERE = (
    "another rank found that a sample's gradient depends on other samples of its batch. Nothing "
    "was released"
)
UNSEEN = (
    "the model {} that could be found: nothing checks whether a sample's gradient depends on other "
    "samples of its batch. Use tensors, in lists, tuples, dictionaries or dataclasses"
)
INCOMPARABLE = (
    "whether a sample's gradient depends on the other samples of its batch cannot be checked for "
    "this model: {}. See opacus.check_isolation"
)

NO_ROWS = (
    "whether a sample's gradient depends on the other samples of its batch cannot be "
    "checked: the model's inputs or outputs have no row for each sample"
)
OFF = (
    "{}=0: nothing checks whether a sample's gradient depends on other "
    "samples of its batch, which no clipping would bound"
)
COUPLED = (
    "the criterion mixes samples: {}. Clipping cannot bound what such a sample "
    "contributes. Likely causes: a contrastive loss with negatives from the batch, or "
    "a loss that is normalised over the batch. Compute it from each sample alone"
)
MEAN = (
    "the loss is {}: the gradient of a sample depends on the other samples of its "
    "batch, which clipping does not bound. Take the mean over each sample's own "
    "positions first (reduction='none', then .mean(1).mean()), or use a ghost mode, whose "
    "criterion does so"
)
NOT_SHOWN = (
    "nothing shows that a sample's gradient does not depend on the other samples of its batch: {}, "
    "and the model's operations could not be followed from its inputs to its layers (compiled "
    "parts, operators of other libraries). Nothing was released. Draw random numbers from torch's "
    "own generators, do not compile the model, or, if you know that it treats each sample by "
    "itself, set OPACUS_ISOLATION_CHECK=0, which switches the check off"
)


def explained(
    found: Difference,
    model: nn.Module,
    together: int,
    scalars: bool = False,
    tokens: bool = False,
) -> str:
    """The message of a difference, with its likely causes."""
    end = "Nothing was released."
    if found.unit < 0:
        return f"in a run on {together} samples of the batch: {found.where}. {end}"
    causes = []
    if tokens:
        causes.append(
            "samples of one row that see each other (attention without a mask by document: "
            "transformers needs position_ids, no attention_mask and use_cache=False; positions "
            "counted from the start of the row)"
        )
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
        causes.append("batch statistics (batch normalisation)")
    if scalars:
        causes.append("a mean over the tokens of the batch in the model's own loss")
        causes.append("a load-balancing loss")
    causes += [
        "rows of a layer that are not samples in their order (sorted, routed, time first)",
        "a parameter that is used outside its layer",
        "a contrastive or normalised loss",
        "batch statistics",
        "capacity limits of experts",
        "tensorwise float8 scales",
    ]
    return (
        f"the gradient of sample {found.unit} is not its own, first at {found.where}: its norm is "
        f"{found.together:.4g} in a batch of {together} and {found.alone:.4g} alone, so "
        f"what is clipped is not what the sample contributes. {end} Likely causes: "
        f"{'; '.join(dict.fromkeys(causes))}"
    )
