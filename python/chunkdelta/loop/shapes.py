"""The dimensions of a hybrid model that decide what a prefill keeps in memory.

Plain data, so that a memory plan needs no weights, no MLX model and no model code: adapters fill
these in from a loaded model or from a configuration file.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionShape:
    """A softmax-attention layer.

    Attributes:
        num_heads: Query heads (Hq).
        num_kv_heads: KV heads (Hkv); divides ``num_heads``.
        head_dim: Dimension of a head (D).
        gated: Whether the output is multiplied by ``sigmoid(gate)``, one gate per output value,
            which widens the query projection to twice ``num_heads * head_dim``.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    gated: bool = True


@dataclass(frozen=True)
class GatedDeltaShape:
    """A gated delta-rule layer.

    Attributes:
        num_k_heads: Key (and query) heads (Hk).
        num_v_heads: Value heads (Hv); a multiple of ``num_k_heads``.
        head_k_dim: Dimension of a key (Dk).
        head_v_dim: Dimension of a value (Dv).
        conv_kernel: Taps of the depthwise causal convolution; 4 in all known models.
    """

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_kernel: int = 4

    @property
    def key_dim(self) -> int:
        return self.num_k_heads * self.head_k_dim

    @property
    def value_dim(self) -> int:
        return self.num_v_heads * self.head_v_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: q, k and v side by side."""
        return 2 * self.key_dim + self.value_dim

    @property
    def state_bytes(self) -> int:
        """Float32 state [Hv, Dv, Dk] of one sequence."""
        return self.num_v_heads * self.head_v_dim * self.head_k_dim * 4


@dataclass(frozen=True)
class MlpShape:
    """The feed-forward part of a layer: dense, or a mixture of experts with a shared one.

    Attributes:
        intermediate: Width of the dense MLP, or of the shared expert (0: none).
        num_experts: Routed experts; 0 for a dense MLP.
        experts_per_token: Experts that each token is sent to.
        expert_intermediate: Width of one routed expert.
    """

    intermediate: int
    num_experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0


@dataclass(frozen=True)
class LayerShape:
    """One decoder layer: a token mixer and its feed-forward part."""

    mixer: AttentionShape | GatedDeltaShape
    mlp: MlpShape | None


@dataclass(frozen=True)
class ModelShape:
    """A hybrid model as a memory plan sees it.

    Attributes:
        hidden: Width of the residual stream.
        vocab: Size of the vocabulary; 0 if the model has no head.
        layers: The decoder layers, in order.
        weight_bytes: Bytes of all weights as stored (quantised or not).
        dtype_bytes: Bytes per activation: 4 for float32, 2 for float16 and bfloat16.
        name: What messages call the model.
    """

    hidden: int
    vocab: int
    layers: tuple[LayerShape, ...]
    weight_bytes: int
    dtype_bytes: int = 2
    name: str = "model"

    @property
    def attention_layers(self) -> list[AttentionShape]:
        return [x.mixer for x in self.layers if isinstance(x.mixer, AttentionShape)]

    @property
    def gated_delta_layers(self) -> list[GatedDeltaShape]:
        return [x.mixer for x in self.layers if isinstance(x.mixer, GatedDeltaShape)]

    @property
    def distinct_layers(self) -> Counter[LayerShape]:
        """How many layers there are of each distinct shape."""
        return Counter(self.layers)
