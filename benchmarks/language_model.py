"""A Llama in plain torch whose attention can be exchanged, and its weights out of a GGUF file.

Parameters have the names that GGUF gives them. Reading a file needs the packages gguf and, for its
tokenizer, tokenizers; the model needs neither.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

END_OF_TEXT = "<|endoftext|>"

# (q [B, Hq, N, D], k and v [B, Hk, N, D]) -> [B, Hq, N, D], causal.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Config:
    layers: int
    channels: int
    hidden: int  # channels of the feed-forward part
    heads: int
    kv_heads: int
    vocabulary: int = 49152
    rope_base: float = 1e5
    epsilon: float = 1e-5  # of the norms

    @property
    def head_dim(self) -> int:
        return self.channels // self.heads


class Block(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        channels, head_dim = config.channels, config.head_dim
        self.head_dim = head_dim
        self.attn_norm = nn.RMSNorm(channels, config.epsilon)
        self.attn_q = nn.Linear(channels, config.heads * head_dim, bias=False)
        self.attn_k = nn.Linear(channels, config.kv_heads * head_dim, bias=False)
        self.attn_v = nn.Linear(channels, config.kv_heads * head_dim, bias=False)
        self.attn_output = nn.Linear(config.heads * head_dim, channels, bias=False)
        self.ffn_norm = nn.RMSNorm(channels, config.epsilon)
        self.ffn_gate = nn.Linear(channels, config.hidden, bias=False)
        self.ffn_up = nn.Linear(channels, config.hidden, bias=False)
        self.ffn_down = nn.Linear(config.hidden, channels, bias=False)

    def forward(self, x: torch.Tensor, rotation: torch.Tensor, attend: Attend) -> torch.Tensor:
        y = self.attn_norm(x)
        q, k, v = (
            project(y).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.attn_q, self.attn_k, self.attn_v)
        )
        out = attend(rotate(q, rotation), rotate(k, rotation), v)
        x = x + self.attn_output(out.transpose(1, 2).flatten(2))
        y = self.ffn_norm(x)
        return x + self.ffn_down(F.silu(self.ffn_gate(y)) * self.ffn_up(y))


class LanguageModel(nn.Module):
    """Random weights as it is made: gaussian, smaller where a block ends."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.token_embd = nn.Embedding(config.vocabulary, config.channels)
        self.blk = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.output_norm = nn.RMSNorm(config.channels, config.epsilon)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                ends = name.endswith(("attn_output.weight", "ffn_down.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * config.layers) ** 0.5 if ends else 0.02)

    def loss(self, windows: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Mean cross-entropy, in nats, of each token of [B, N + 1] but the first of a row."""
        x = self.token_embd(windows[:, :-1])
        rotation = rotations(x.shape[1], self.config, x.device)
        for block in self.blk:
            x = block(x, rotation, attend)
        logits = F.linear(self.output_norm(x), self.token_embd.weight)
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def rotations(tokens: int, config: Config, device: torch.device) -> torch.Tensor:
    """What rotary embedding multiplies pairs of channels by: complex64 [tokens, head_dim / 2]."""
    exponents = torch.arange(0, config.head_dim, 2, device=device) / config.head_dim
    angles = torch.outer(torch.arange(tokens, device=device), config.rope_base**-exponents)
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [B, H, N, D], pairs of neighbours: so GGUF stores Llama's channels."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)


def load_gguf(path: Path) -> LanguageModel:
    """The Llama in a GGUF file, its weights made FP32. Its embeddings must be tied."""
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(path)

    def fact(name: str):
        return reader.fields[f"llama.{name}"].contents()

    config = Config(
        layers=fact("block_count"),
        channels=fact("embedding_length"),
        hidden=fact("feed_forward_length"),
        heads=fact("attention.head_count"),
        kv_heads=fact("attention.head_count_kv"),
        vocabulary=fact("vocab_size"),
        rope_base=fact("rope.freq_base"),
        epsilon=fact("attention.layer_norm_rms_epsilon"),
    )
    weights = {
        x.name: torch.from_numpy(dequantize(x.data, x.tensor_type).copy()) for x in reader.tensors
    }
    model = LanguageModel(config)
    model.load_state_dict(weights)
    return model


def load_tokenizer(path: Path):
    """The ``tokenizers.Tokenizer`` of a GGUF file of SmolLM2's family."""
    from gguf import GGUFReader
    from tokenizers import Tokenizer, models, pre_tokenizers

    fields = GGUFReader(path).fields
    kind = fields["tokenizer.ggml.pre"].contents()
    if kind != "smollm":
        raise ValueError(f"{path} splits text as {kind!r} does; only 'smollm' is known here")
    words = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    return tokenizer
