"""A head in training: its parameters, where they begin, its unrolled forward, and the checkpoint it becomes.

The head is one Llama layer over [norm E(t), norm h] (EAGLE-3: Li et al. 2025, arXiv 2503.01840; see eagle_head). What
is particular here is where training starts if not with another head, since most heads are trained on little:

- ``fc`` is the least-squares map from a token's tapped hidden states to the last one of the token behind it, which is
  what g must be; the layer adds nothing at first.
- The output layer is the target's own, kept as it is. What is only partly predicted must not be claimed loudly: the
  final norm begins at ``_GAIN`` of the target's.
- Queries and keys read the embedding as those of the target's first layer do, which look near by from the beginning.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from minispec.drafters.eagle_head import EagleConfig, EagleForward, HeadLayer, HeadWeights
from minispec.kernels.rms_norm import rms_norm_ref
from minispec.kernels.silu_mul import silu_mul_ref
from minispec.model.config import ModelConfig
from minispec.model.linear import Linear
from minispec.model.llama import Llama
from minispec.model.rope import Rope, RopeConfig
from minispec.train.files import write
from minispec.train.origin import Origin
from minispec.train.shards import Sample

ARCHITECTURE = "LlamaForCausalLMEagle3"
_RIDGE = 1e-2  # of the mean square, in the least-squares start of fc
_GAIN = 0.6  # loss at the start, held-out text of smollm2-135m: 4.9, 4.8, 4.8 and 5.5 at 0.5, 0.6, 0.7 and 1
_QUIET = 0.25  # of the random weights with which queries and keys read the hidden state, beside copied ones
_STD = 0.02  # of randomly drawn weights
_SCALED, _FITTED = 256, 1024  # samples that the scale of features is found on, and the start of fc


class _Differentiable:
    """The torch references, which autograd can follow, on any device."""

    rms_norm = staticmethod(rms_norm_ref)
    silu_mul = staticmethod(silu_mul_ref)


def default_taps(num_layers: int) -> tuple[int, ...]:
    """After the second layer, half of them, and all but three: what other servers assume where a head does not say.
    Models of few layers have fewer to choose from."""
    return tuple(sorted({min(2, num_layers - 1), num_layers // 2, max(num_layers - 3, 0)} - {num_layers}))


def _is_assumed(taps: tuple[int, ...], num_layers: int) -> bool:
    return taps == (2, num_layers // 2, num_layers - 3)


def head_shape(target: ModelConfig) -> ModelConfig:
    """The head's decoder layer: one of the target's, as far as a plain Llama layer can be that."""
    return ModelConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_layers=1,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        rms_norm_eps=target.rms_norm_eps,
        # whatever stretches the target's context: other servers read theta alone
        rope=RopeConfig(theta=target.rope.theta),
        max_position=target.max_position,
    )


class TrainableHead:
    """The parameters of a head, fused as the forward wants them, in float32.

    Attributes:
        config: its shape.
        parameters: by name; ``fc`` reads features divided by ``scale``.
        scale: [taps * hidden], of the features, per dimension.
        ids: [logits] int64, the target's id of each logit, ascending.
        output: [logits, hidden], the output layer, which is not trained.
    """

    def __init__(
        self, config: EagleConfig, parameters: Mapping[str, Tensor], scale: Tensor, ids: Tensor, target: Llama
    ) -> None:
        self.config = config
        self.parameters = {
            # copies: one of them is the target's own norm
            name: nn.Parameter(tensor.to(torch.float32, copy=True))
            for name, tensor in parameters.items()
        }
        self.scale = scale.float()
        self.ids = ids
        self.output = target.head.weight[ids.to(target.device)].float()
        self.rope = Rope(config.layer.rope, config.layer.head_dim, target.device)
        own = self.parameters
        layer = HeadLayer(
            input_norm=own["input_norm"],
            hidden_norm=own["hidden_norm"],
            qkv=Linear(own["qkv"]),
            q_norm=None,
            k_norm=None,
            o=Linear(own["o"]),
            post_norm=own["post_norm"],
            gate_up=Linear(own["gate_up"]),
            down=Linear(own["down"]),
        )
        weights = HeadWeights(
            fc=Linear(own["fc"]),
            fc_norm=None,
            layers=[layer],
            norm=own["norm"],
            embedding=target.embedding.float(),
        )
        self.forward = EagleForward(config, weights, _Differentiable())

    @staticmethod
    def start(target: Llama, ids: Tensor, taps: tuple[int, ...], samples: Sequence[Sample], seed: int) -> TrainableHead:
        """A head before its first step.

        Args:
            ids: [logits] int64, see the class.
            samples: text; their features are the tapped hidden states, and the target's last one.
            seed: of what is drawn.
        """
        shape = head_shape(target.config)
        hidden, inner = shape.hidden_size, shape.intermediate_size
        widths = [n * shape.head_dim for n in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)]
        generator = torch.Generator().manual_seed(seed)

        def draw(rows: int, columns: int, std: float = _STD) -> Tensor:
            return torch.randn(rows, columns, generator=generator) * std

        wide = len(taps) * hidden
        scale = text_scale(samples, wide)
        pairs = (
            (s.features[:-1, :wide].float() / scale, unit_rms(s.features[1:, wide:]), s.wanted[1:])
            for s in samples[:_FITTED]
        )
        queries = first_queries(target)
        qkv = draw(sum(widths), 2 * hidden)
        qkv[: len(queries), :hidden] = queries
        qkv[: len(queries), hidden:] *= _QUIET
        parameters = {
            "fc": least_squares((x[kept], y[kept]) for x, y, kept in pairs),
            "input_norm": torch.ones(hidden),
            "hidden_norm": torch.ones(hidden),
            "qkv": qkv,
            "o": torch.zeros(hidden, widths[0]),
            "post_norm": torch.ones(hidden),
            "gate_up": draw(2 * inner, hidden),
            "down": torch.zeros(hidden, inner),
            "norm": target.norm.float().cpu() * _GAIN,
        }
        config = EagleConfig(version=3, layer=shape, taps=taps)
        device = target.device
        return TrainableHead(config, {k: p.to(device) for k, p in parameters.items()}, scale.to(device), ids, target)

    @staticmethod
    def go_on(origin: Origin, target: Llama, ids: Tensor, samples: Sequence[Sample]) -> TrainableHead:
        """A head that was trained before, as good as it was; its output layer and embedding become the target's.

        Args:
            origin: the head.
            ids: [logits] int64, see the class.
            samples: text, with the features that the head taps.
        """
        wide = len(origin.config.taps) * target.config.hidden_size
        scale = text_scale(samples, wide)
        parameters = {**origin.parameters, "fc": origin.parameters["fc"] * scale}
        device = target.device
        return TrainableHead(
            origin.config, {k: p.to(device) for k, p in parameters.items()}, scale.to(device), ids, target
        )

    def fuse(self, features: Tensor) -> Tensor:
        """[rows, taps * hidden], as tapped, to h: [rows, hidden]."""
        return self.forward.weights.fc(features.float() / self.scale)

    def save(self, folder: Path, target: ModelConfig, notes: Mapping[str, object] | None = None) -> None:
        """Write the EAGLE-3 checkpoint (config.json, model.safetensors) in bfloat16, each file in one move.

        Args:
            notes: more entries of config.json.
        """
        shape, own = self.config.layer, {name: p.detach().cpu() for name, p in self.parameters.items()}
        widths = [n * shape.head_dim for n in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)]
        q, k, v = own["qkv"].split(widths)
        gate, up = own["gate_up"].chunk(2)
        layer = {
            "input_layernorm": own["input_norm"],
            "hidden_norm": own["hidden_norm"],
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": own["o"],
            "post_attention_layernorm": own["post_norm"],
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": own["down"],
        }
        tensors = {f"midlayer.{name}.weight": tensor for name, tensor in layer.items()}
        tensors |= {
            "fc.weight": own["fc"] / self.scale.cpu(),
            "norm.weight": own["norm"],
            "lm_head.weight": self.output.cpu(),
        }
        weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
        ids = self.ids.cpu()
        weights["d2t"] = ids - torch.arange(len(ids))
        weights["t2d"] = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
        config: dict[str, object] = {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            "torch_dtype": "bfloat16",
            "hidden_size": shape.hidden_size,
            "target_hidden_size": target.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": shape.max_position,
            "rms_norm_eps": shape.rms_norm_eps,
            "rope_theta": shape.rope.theta,
            "rope_scaling": None,
            "vocab_size": target.vocab_size,
            "draft_vocab_size": len(ids),
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
        }
        if not _is_assumed(self.config.taps, target.num_layers):
            config["eagle_aux_hidden_state_layer_ids"] = list(self.config.taps)
        config |= notes or {}
        write(folder / "model.safetensors", lambda path: save_file(weights, path, {"format": "pt"}))
        write(folder / "config.json", lambda path: path.write_text(json.dumps(config, indent=2) + "\n"))


def text_scale(samples: Sequence[Sample], wide: int) -> Tensor:
    """[wide]: ``feature_scale`` of the first ``wide`` columns of what is recorded of ``samples``."""
    return feature_scale(torch.cat([s.features[:, :wide] for s in samples[:_SCALED]]).float())


def feature_scale(features: Tensor) -> Tensor:
    """[dims]: how far each dimension spreads, by the median, as a few rows hold numbers a thousand times the usual."""
    sample = features[:: max(1, len(features) // 4096)]
    spread = (sample - sample.median(dim=0).values).abs().median(dim=0).values * 1.48
    return spread.clamp(min=float(spread.mean()) * 0.05 + 1e-6)


def usual(features: Tensor, scale: Tensor) -> Tensor:
    """[rows] bool: the rows without such numbers."""
    size = (features.float() / scale).pow(2).mean(dim=-1)
    return size < 25 * size.median()


def least_squares(pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """[out, in]: the weight W that minimises the squared error of x Wᵀ against y, over the rows that are no outliers.

    Args:
        pairs: (x [rows, in], y [rows, out]), piece by piece.
    """
    gram, moment = torch.zeros(()), torch.zeros(())
    for x, y in pairs:
        kept = usual(x, torch.ones(()))
        x, y = x[kept], y[kept]
        gram, moment = gram + x.T @ x, moment + x.T @ y
    wide = gram.double()
    ridge = _RIDGE * wide.diagonal().mean() * torch.eye(len(gram), dtype=torch.double)
    return torch.linalg.solve(wide + ridge, moment.double()).T.float()


def first_queries(target: Llama) -> Tensor:
    """[(heads + kv_heads) * head_dim, hidden] float32: how the target's first layer makes queries and keys of a normed
    embedding. None of its biases and norms of queries and keys: a head has neither."""
    layer, config = target.layers[0], target.config
    rows = (config.num_heads + config.num_kv_heads) * config.head_dim
    # whatever layout the weight is in, it is what it does to the unit vectors
    identity = torch.eye(config.hidden_size, dtype=target.dtype, device=target.device)
    made = layer.qkv(identity).float() - (0.0 if layer.qkv.bias is None else layer.qkv.bias.float())
    return (made.T[:rows] * layer.input_norm.float()).cpu()


def unit_rms(hidden: Tensor) -> Tensor:
    """Rows scaled to a mean square of 1."""
    wide = hidden.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
