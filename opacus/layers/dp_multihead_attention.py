"""Multi-head attention made of layers for which per-sample gradients are known."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from opacus.layers.attention import attend, attend_with_weights, merge_masks
from opacus.layers.linear import BatchFirstLinear

# Parameters of nn.MultiheadAttention and which of ours, stacked, they are; others are equal.
OWN_NAMES = {
    "in_proj_weight": ("qlinear.weight", "klinear.weight", "vlinear.weight"),
    "q_proj_weight": ("qlinear.weight",),
    "k_proj_weight": ("klinear.weight",),
    "v_proj_weight": ("vlinear.weight",),
    "in_proj_bias": ("qlinear.bias", "klinear.bias", "vlinear.bias"),
    "bias_k": ("seq_bias_k.bias",),
    "bias_v": ("seq_bias_v.bias",),
}


class SequenceBias(nn.Module):
    """Appends a learned vector to each sequence.

    Args:
        embed_dim: Number of features E.
        batch_first: Whether sequences are ``[B, T, E]`` instead of ``[T, B, E]``.
    """

    def __init__(self, embed_dim: int, batch_first: bool = False) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.bias = nn.Parameter(torch.empty(embed_dim))
        nn.init.normal_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` with the bias as one more time step at its end.

        Args:
            x: ``[T, B, E]``, or ``[B, T, E]`` if ``batch_first``.
        """
        time, batch = (1, 0) if self.batch_first else (0, 1)
        shape = list(x.shape)
        shape[time], shape[batch] = 1, x.shape[batch]
        return torch.cat([x, self.bias.to(x.dtype).expand(shape)], dim=time)


class _NoFusedPath:
    """In the place of ``in_proj_weight``: makes torch's encoder call this module.

    At inference ``nn.TransformerEncoder`` would hand the weights of its layers to a
    fused kernel, unless one of them overrides torch functions, as this claims to.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


class DPMultiheadAttention(nn.Module):
    """``nn.MultiheadAttention`` for differentially private training (arXiv:1706.03762).

    Gives the same results as torch's module. The projections of queries, keys and values
    are three linear layers. ``state_dict()`` of this module alone uses torch's names;
    as part of a larger module it uses those of its linear layers, as parameters do.
    Either is accepted by ``load_state_dict``. See :func:`torch_state_dict` for larger
    modules.

    Args:
        embed_dim: Number of features E of the output; ``num_heads`` divides it.
        num_heads: Number of heads H.
        dropout: Probability of dropout of attention weights.
        bias: Whether the linear layers have biases.
        add_bias_kv: Whether a learned vector is appended to keys and to values.
        add_zero_attn: Whether a zero vector is appended to keys and to values.
        kdim: Number of features of keys; E if not given.
        vdim: Number of features of values; E if not given.
        batch_first: Whether inputs are ``[B, T, E]`` instead of ``[T, B, E]``.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Raises:
        ValueError: ``num_heads`` does not divide ``embed_dim``.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_heads <= 0 or embed_dim <= 0 or embed_dim % num_heads:
            raise ValueError(
                "embed_dim must be a positive multiple of num_heads, got "
                f"embed_dim={embed_dim}, num_heads={num_heads}"
            )
        self.embed_dim = embed_dim
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.batch_first = batch_first
        self.add_bias_kv = add_bias_kv
        self.add_zero_attn = add_zero_attn
        widths = (embed_dim, self.kdim, self.vdim, embed_dim)
        self.qlinear, self.klinear, self.vlinear, self.out_proj = (
            BatchFirstLinear(width, embed_dim, bias, device, dtype) for width in widths
        )
        self.seq_bias_k = SequenceBias(embed_dim, batch_first=True) if add_bias_kv else None
        self.seq_bias_v = SequenceBias(embed_dim, batch_first=True) if add_bias_kv else None
        self.dropout = nn.Dropout(dropout)
        # What torch's encoder layers look at before they take their fused path.
        self.in_proj_weight = _NoFusedPath()
        self.in_proj_bias = None
        self._qkv_same_embed_dim = False
        self._shows_torch_names = False
        self.register_state_dict_post_hook(_show_torch_names)
        self.register_load_state_dict_pre_hook(_accept_torch_names)
        self.to(device=device, dtype=dtype)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        average_attn_weights: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from queries to keys and values.

        Args:
            query: ``[T, B, E]`` (``[B, T, E]`` if ``batch_first``), or ``[T, E]`` for one
                sample without a batch dimension.
            key: ``[S, B, kdim]``, laid out as ``query``.
            value: ``[S, B, vdim]``, laid out as ``query``.
            key_padding_mask: ``[B, S]`` (``[S]`` without batch); bool: true keys are
                ignored; float: added to the scores.
            need_weights: Whether to return attention weights. Without them torch's fused
                attention is used.
            attn_mask: ``[T, S]`` or ``[B * H, T, S]``; bool: true pairs do not attend;
                float: added to the scores.
            is_causal: A promise that ``attn_mask`` is the causal mask, so that a faster
                kernel may be used.
            average_attn_weights: Whether weights are averaged over the heads.

        Returns:
            The output, laid out as ``query``, and the attention weights ``[B, T, S]``
            (``[B, H, T, S]`` if not averaged; no B without batch) or ``None``.

        Raises:
            ValueError: A shape does not fit, or ``is_causal`` comes without ``attn_mask``.
        """
        if is_causal and attn_mask is None:
            raise ValueError("is_causal=True needs attn_mask, the causal mask it describes")
        batched = query.dim() == 3
        if key_padding_mask is not None and not batched:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        q, k, v = self._project(*self._samples_first(query, key, value))
        mask = self._mask(attn_mask, key_padding_mask, q, k)
        if need_weights:
            heads, weights = attend_with_weights(q, k, v, mask, self.dropout)
            weights = weights.mean(dim=1) if average_attn_weights else weights
        else:
            # Extra keys are attended to from everywhere, so the mask is no longer causal.
            extra = self.add_bias_kv or self.add_zero_attn
            causal = is_causal and key_padding_mask is None and not extra
            dropout = self.dropout.p if self.dropout.training else 0.0
            heads = attend(q, k, v, None if causal else mask, dropout=dropout, causal=causal)
            weights = None
        output = self.out_proj(heads.transpose(1, 2).flatten(2))  # [B, T, E]
        if not batched:
            return output.squeeze(0), None if weights is None else weights.squeeze(0)
        return output if self.batch_first else output.transpose(0, 1), weights

    def _samples_first(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """The sequences as ``[B, T, *]``; what was one tensor stays one tensor."""
        sequences = (query, key, value)
        if not query.dim() == key.dim() == value.dim() or query.dim() not in (2, 3):
            raise ValueError(
                "query, key and value must all have 3 dimensions, or 2 without a batch, got "
                f"shapes {[tuple(s.shape) for s in sequences]}"
            )
        if query.dim() == 3 and self.batch_first:
            return list(sequences)
        changed = {
            id(s): s.unsqueeze(0) if query.dim() == 2 else s.transpose(0, 1) for s in sequences
        }
        return [changed[id(s)] for s in sequences]

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Queries, keys and values of each head, ``[B, H, T or S, head_dim]``."""
        if key.shape[:2] != value.shape[:2] or query.shape[0] != key.shape[0]:
            raise ValueError(
                "query, key and value must have the same batch size, key and value the same "
                f"length; batch first, got {[tuple(s.shape) for s in (query, key, value)]}"
            )
        k, v = self.klinear(key), self.vlinear(value)
        if self.seq_bias_k is not None and self.seq_bias_v is not None:
            k, v = self.seq_bias_k(k), self.seq_bias_v(v)
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        return [
            projected.unflatten(2, (self.num_heads, self.head_dim)).transpose(1, 2)
            for projected in (self.qlinear(query), k, v)
        ]

    def _mask(
        self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor, k: Tensor
    ) -> Tensor | None:
        extra = int(self.add_bias_kv) + int(self.add_zero_attn)
        sizes = (q.shape[0], self.num_heads, q.shape[2], k.shape[2] - extra)
        mask = merge_masks(attn_mask, key_padding_mask, sizes, q.dtype)
        return mask if mask is None else F.pad(mask, (0, extra))

    def unsqueeze_0_2(self, t: Tensor) -> Tensor:
        """``t`` with two leading dimensions of size one."""
        return t[None, None]

    def state_dict(self, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """As ``nn.Module.state_dict``, with torch's names unless part of a larger module.

        Args:
            destination: State dict to fill in; given when a larger module is saved.
            prefix: What precedes each key.
            keep_vars: Whether to keep the tensors attached to the graph.
        """
        self._shows_torch_names = destination is None
        try:
            return super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        finally:
            self._shows_torch_names = False


def torch_state_dict(module: nn.Module, *, keep_vars: bool = False) -> dict[str, Tensor]:
    """The state dict of a model as if its DP layers were torch's own.

    Loads into the model that ``ModuleValidator.fix`` was given, as far as ``fix``
    replaced layers by equivalent ones.

    Args:
        module: Any module.
        keep_vars: Whether to keep the tensors attached to the graph.
    """
    state_dict: dict[str, Tensor] = module.state_dict(keep_vars=keep_vars)
    for name, submodule in module.named_modules(remove_duplicate=False):
        if isinstance(submodule, DPMultiheadAttention):
            _to_torch_names(state_dict, f"{name}." if name else "", submodule)
    return state_dict


def _show_torch_names(
    module: DPMultiheadAttention, state_dict: Any, prefix: str, local_metadata: Any
) -> None:
    if module._shows_torch_names:
        _to_torch_names(state_dict, prefix, module)


def _to_torch_names(
    state_dict: dict[str, Tensor], prefix: str, module: DPMultiheadAttention
) -> None:
    """Replace the entries of one attention module by torch's, in torch's order."""
    own = {key: state_dict.pop(key) for key in list(state_dict) if key.startswith(prefix)}
    one_matrix = module.embed_dim == module.kdim == module.vdim
    renamed: dict[str, Tensor] = {}
    for torch_name, names in OWN_NAMES.items():
        fitting = one_matrix or torch_name != "in_proj_weight"
        keys = [prefix + name for name in names]
        # They are not there without bias, or if layers were exchanged for others.
        if fitting and all(key in own for key in keys):
            joined = torch.cat([own.pop(key) for key in keys])
            if torch_name in ("bias_k", "bias_v"):
                joined = module.unsqueeze_0_2(joined)
            renamed[prefix + torch_name] = joined
    state_dict.update({**renamed, **own})


def _accept_torch_names(module: nn.Module, state_dict: Any, prefix: str, *_: Any) -> None:
    """Turn torch's entries for this module into its own."""
    for torch_name in OWN_NAMES:
        joined = state_dict.pop(prefix + torch_name, None)
        if joined is not None:
            own = split_torch_parameter(torch_name, joined)
            state_dict.update({prefix + name: part for name, part in own.items()})


def split_torch_parameter(torch_name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The parameters of :class:`DPMultiheadAttention`, by name, that one of torch's holds.

    Args:
        torch_name: Name of a parameter of ``nn.MultiheadAttention``.
        tensor: Its value.
    """
    names = OWN_NAMES.get(torch_name, (torch_name,))
    parts = tensor.tensor_split(len(names))
    if torch_name in ("bias_k", "bias_v"):
        parts = tuple(part.flatten() for part in parts)
    return dict(zip(names, parts, strict=True))
