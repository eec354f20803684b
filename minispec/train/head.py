"""A head in training: its parameters, where they begin, its unrolled forward, and the checkpoint it becomes.

The head is one Llama layer over [norm E(t), norm h] (EAGLE-3: Li et al. 2025, arXiv 2503.01840; see eagle_head). What
is particular here is where training starts, since most heads are trained on little: ``fc`` is the least-squares map
from the tapped hidden states to the target's last one, and the output layer is the target's own, kept as it is. So at
step 0 the head knows the space that it predicts in, and its own g can stand in for h from the beginning.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
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

ARCHITECTURE = "LlamaForCausalLMEagle3"
_RIDGE = 1e-3  # of the mean square, in the least-squares start of fc
_STD = 0.02  # of randomly drawn weights


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
    def start(target: Llama, ids: Tensor, taps: tuple[int, ...], features: Tensor, seed: int) -> TrainableHead:
        """A head before its first step.

        Args:
            ids: [logits] int64, see the class.
            features: [rows, (taps + 1) * hidden], a sample of the tapped hidden states, and the target's last one.
            seed: of what is drawn.
        """
        shape = head_shape(target.config)
        hidden, inner = shape.hidden_size, shape.intermediate_size
        widths = [n * shape.head_dim for n in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)]
        generator = torch.Generator().manual_seed(seed)

        def draw(rows: int, columns: int, std: float = _STD) -> Tensor:
            return torch.randn(rows, columns, generator=generator) * std

        tapped, last = features.float().split([len(taps) * hidden, hidden], dim=-1)
        scale = feature_scale(tapped)
        parameters = {
            "fc": least_squares(tapped / scale, unit_rms(last)),
            "input_norm": torch.ones(hidden),
            "hidden_norm": torch.ones(hidden),
            "qkv": draw(sum(widths), 2 * hidden),
            "o": torch.zeros(hidden, widths[0]),
            "post_norm": torch.ones(hidden),
            "gate_up": draw(2 * inner, hidden),
            "down": torch.zeros(hidden, inner),
            "norm": target.norm.float().cpu(),
        }
        config = EagleConfig(version=3, layer=shape, taps=taps)
        device = target.device
        return TrainableHead(config, {k: p.to(device) for k, p in parameters.items()}, scale.to(device), ids, target)

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


def feature_scale(features: Tensor) -> Tensor:
    """[dims]: how far each dimension spreads, by the median, as a few rows hold numbers a thousand times the usual."""
    sample = features[:: max(1, len(features) // 4096)]
    spread = (sample - sample.median(dim=0).values).abs().median(dim=0).values * 1.48
    return spread.clamp(min=float(spread.mean()) * 0.05 + 1e-6)


def usual(features: Tensor, scale: Tensor) -> Tensor:
    """[rows] bool: the rows without such numbers."""
    size = (features.float() / scale).pow(2).mean(dim=-1)
    return size < 25 * size.median()


def least_squares(inputs: Tensor, outputs: Tensor) -> Tensor:
    """[out, in]: the weight W that minimises the squared error of inputs Wᵀ, over the rows that are no outliers."""
    kept = usual(inputs, torch.ones(()))
    x, y = inputs[kept].double(), outputs[kept].double()
    gram = x.T @ x
    ridge = _RIDGE * gram.diagonal().mean()
    return torch.linalg.solve(
        gram + ridge * torch.eye(len(gram), dtype=gram.dtype, device=gram.device), x.T @ y
    ).T.float()


def unit_rms(hidden: Tensor) -> Tensor:
    """Rows scaled to a mean square of 1."""
    wide = hidden.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)


def write(path: Path, how: Callable[[Path], object]) -> None:
    """Make a file in one move: ``how`` writes it under another name."""
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    how(hidden)
    hidden.chmod(0o644)  # safetensors keeps its files to their owner
    hidden.replace(path)
