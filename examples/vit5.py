"""ViT-5, of Wang et al. (arXiv 2602.08071), as a model of one's own: `--model examples/vit5.py:vit5_s`.

A plain vision transformer with parts of recent language models: RMSNorm, queries and keys normalised in each head, no
bias in their projection, LayerScale, rotary position embeddings beside learned ones, and four registers. Sizes and
constants are those of the paper and of github.com/wangf3014/ViT-5; the code is ours and needs only torch, torchvision.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops import StochasticDepth

PATCH_PX, EPS, LAYER_SCALE = 16, 1e-6, 1e-4
REGISTERS_SIDE = 2  # four registers, rotated as a grid of 2 x 2
THETA, REGISTERS_THETA = 10_000.0, 100.0  # bases of the frequencies of patches and of registers


def grid_angles(side: int, dim: int, theta: float) -> Tensor:
    """Return the angles of a grid's tokens, row by row: the first half by their row, the second by their column.

    Args:
        side: rows and columns of the grid.
        dim: channels of a head, a multiple of 4.
        theta: base of the frequencies, which fall from 1 to nearly 1 / theta.

    Returns:
        (side * side, dim / 2), radians.
    """
    frequencies = theta ** -(torch.arange(0, dim // 2, 2) / (dim // 2))
    steps = torch.arange(side)[:, None] * frequencies
    return torch.cat([steps.repeat_interleave(side, dim=0), steps.repeat(side, 1)], dim=1)


def rotate(tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair of channels, 2i and 2i + 1, of tokens (..., N, dim) by an angle: RoPE (arXiv 2104.09864).

    `cos` and `sin` of the angles are (N, dim / 2). The product of two rotated tokens depends on where they are to each
    other, not on where they are.
    """
    even, odd = tokens[..., ::2], tokens[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


class HeadNorm(nn.RMSNorm):
    """RMSNorm that computes in float32 and rounds to its input's type before and after its weight, as the source's."""

    def forward(self, heads: Tensor) -> Tensor:
        """Return normalised channels (..., dim) of a head, in the type of `heads`."""
        normed = F.rms_norm(heads.float(), self.normalized_shape, eps=self.eps).to(heads.dtype)
        return (self.weight * normed).to(heads.dtype)


class Attention(nn.Module):
    """Self-attention between normalised, rotated queries and keys."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.q_norm = HeadNorm(dim // num_heads, eps=EPS)
        self.k_norm = HeadNorm(dim // num_heads, eps=EPS)
        self.proj = nn.Linear(dim, dim)

    def forward(self, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return (B, N, dim) for tokens (B, N, dim)."""
        q, k, v = self.qkv(tokens).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        # Under mixed precision rotated in float32, from normalised values of 16 bits, as in the source.
        q = rotate(self.q_norm(q), cos, sin).to(v.dtype)
        k = rotate(self.k_norm(k), cos, sin).to(v.dtype)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and two layers, each behind a norm and scaled to nearly nothing at first, beside the identity."""

    def __init__(self, dim: int, num_heads: int, drop_path: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(dim, eps=EPS), nn.RMSNorm(dim, eps=EPS)
        self.attn = Attention(dim, num_heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.gamma_1 = nn.Parameter(torch.full((dim,), LAYER_SCALE))
        self.gamma_2 = nn.Parameter(torch.full((dim,), LAYER_SCALE))
        self.drop_path = StochasticDepth(drop_path, "row")  # --stochastic-depth finds torchvision's

    def forward(self, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return (B, N, dim) for tokens (B, N, dim)."""
        tokens = tokens + self.drop_path(self.gamma_1 * self.attn(self.norm1(tokens), cos, sin))
        return tokens + self.drop_path(self.gamma_2 * self.mlp(self.norm2(tokens)))


def resize_positions(model: "ViT5", state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Resize the learned positions of weights for images of another size, bicubically, as the source's fine-tuning."""
    name, count = f"{prefix}pos_embed", model.pos_embed.shape[1]
    if name in state and state[name].shape[1] != count:
        old, new = math.isqrt(state[name].shape[1]), math.isqrt(count)
        grid = state[name].transpose(1, 2).unflatten(2, (old, old))
        state[name] = F.interpolate(grid, size=(new, new), mode="bicubic").flatten(2).transpose(1, 2)


class ViT5(nn.Module):
    """Tokens are the class token, which is not rotated and alone is scored, the patches, and the registers.

    Args:
        num_classes: scores of an image.
        dim: channels of a token.
        depth: number of blocks.
        num_heads: heads of the attention.
        image_size: height and width of an image, px.
        drop_path: stochastic depth, the same in every block.
        in_chans: channels of an image.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        dim: int,
        depth: int,
        num_heads: int,
        image_size: int,
        drop_path: float,
        in_chans: int,
    ) -> None:
        super().__init__()
        side, head_dim = image_size // PATCH_PX, dim // num_heads
        self.patch_embed = nn.Conv2d(in_chans, dim, PATCH_PX, stride=PATCH_PX)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, side**2, dim))
        self.reg_token = nn.Parameter(torch.zeros(1, REGISTERS_SIDE**2, dim))
        self.blocks = nn.ModuleList(Block(dim, num_heads, drop_path) for _ in range(depth))
        self.norm = nn.RMSNorm(dim, eps=EPS)
        self.head = nn.Linear(dim, num_classes)
        patches = F.pad(grid_angles(side, head_dim, THETA), (0, 0, 1, 0))  # and a class token that is not rotated
        angles = torch.cat([patches, grid_angles(REGISTERS_SIDE, head_dim, REGISTERS_THETA)])
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for token in (self.cls_token, self.pos_embed, self.reg_token):
            nn.init.trunc_normal_(token, std=0.02)
        self.register_load_state_dict_pre_hook(resize_positions)

    def no_weight_decay(self) -> set[str]:
        """Return the names of the parameters that --no-decay-1d exempts beside vectors."""
        return {"cls_token", "pos_embed", "reg_token"}

    def forward(self, image: Tensor) -> Tensor:
        """Return scores (B, num_classes) of images (B, in_chans, image_size, image_size)."""
        patches = self.patch_embed(image).flatten(2).transpose(1, 2) + self.pos_embed
        first, last = (token.expand(len(image), -1, -1) for token in (self.cls_token, self.reg_token))
        tokens = torch.cat([first, patches, last], dim=1)
        for block in self.blocks:
            tokens = block(tokens, self.cos, self.sin)
        return self.head(self.norm(tokens)[:, 0])


def vit5_s(num_classes: int, image_size: int = 224, drop_path: float = 0.05, in_chans: int = 3) -> ViT5:
    """Return ViT-5-S, of 22.0 million parameters with 1,000 classes; arguments as of `ViT5`."""
    sizes = {"dim": 384, "depth": 12, "num_heads": 6}
    return ViT5(num_classes, **sizes, image_size=image_size, drop_path=drop_path, in_chans=in_chans)


def vit5_b(num_classes: int, image_size: int = 224, drop_path: float = 0.2, in_chans: int = 3) -> ViT5:
    """Return ViT-5-B, of 86.5 million parameters with 1,000 classes; arguments as of `ViT5`."""
    sizes = {"dim": 768, "depth": 12, "num_heads": 12}
    return ViT5(num_classes, **sizes, image_size=image_size, drop_path=drop_path, in_chans=in_chans)
