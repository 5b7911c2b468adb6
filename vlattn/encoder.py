"""Image encoders: pictures to patch tokens.

B batch, S_h, S_w sides of the input, gh, gw patches per side, N = gh * gw patches, P tokens before
them that have no place in the picture, D width.
"""

from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from vlattn.attention import ScaledDotProductAttention
from vlattn.layers import Dropout, make_activation, make_norm


class PatchFeatures(NamedTuple):
    """What an encoder returns: tokens (B, P + N, D), patches row by row, and the grid (gh, gw).

    P is 0 but for an encoder that keeps its class or register tokens, or tells what the whole
    picture is: words may attend to these too, and no map shows them.
    """

    tokens: Tensor
    grid_size: tuple[int, int]

    @property
    def num_prefix(self) -> int:
        """P, the tokens before the patches."""
        return self.tokens.size(1) - self.grid_size[0] * self.grid_size[1]


class PatchEmbed(nn.Module):
    """Cuts a picture into patches and projects each; sides are any multiples of `patch_size`.

    Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR 2021. With `stem=True` a few strided
    convolutions take the place of the one large step, which trains faster and more stably (Xiao et
    al., "Early Convolutions Help Transformers See Better", NeurIPS 2021); `patch_size` is then a
    power of two.
    """

    def __init__(self, patch_size: int, dim: int, *, in_channels: int = 3, stem: bool = False):
        super().__init__()
        self.patch_size = patch_size
        if stem:
            self.proj = _conv_stem(patch_size, in_channels, dim)
        else:
            self.proj = nn.Conv2d(in_channels, dim, patch_size, patch_size)

    def forward(self, pixels: Tensor) -> PatchFeatures:
        if pixels.dim() != 4 or any(side % self.patch_size for side in pixels.shape[-2:]):
            raise ValueError(
                "pixels must have shape (B, C, S_h, S_w) with sides divisible by "
                f"patch_size={self.patch_size}, got {tuple(pixels.shape)}"
            )
        grid = self.proj(pixels.contiguous(memory_format=torch.channels_last))  # (B, D, gh, gw)
        return PatchFeatures(grid.flatten(2).transpose(1, 2), tuple(grid.shape[-2:]))


def _conv_stem(patch_size: int, in_channels: int, dim: int) -> nn.Sequential:
    """Each convolution halves the sides; 4 x 4 kernels keep a token on the middle of its patch."""
    halvings = patch_size.bit_length() - 1
    if patch_size != 2**halvings or halvings == 0:
        raise ValueError(f"patch_size of a stem must be a power of two above 1, got {patch_size}")
    layers: list[nn.Module] = []
    for step in reversed(range(halvings)):
        width = max(dim >> step, 16)
        layers += [nn.Conv2d(in_channels, width, 4, 2, 1), nn.BatchNorm2d(width), nn.ReLU()]
        in_channels = width
    stem = nn.Sequential(*layers, nn.Conv2d(in_channels, dim, 1))
    return stem.to(memory_format=torch.channels_last)  # the faster layout on a CPU


def sine_positions(grid_size: tuple[int, int], dim: int) -> Tensor:
    """Fixed 2-D positions (gh * gw, dim): half of the width tells the row, half the column."""
    if dim % 4:
        raise ValueError(f"dim of 2-D sine positions must be divisible by 4, got {dim}")
    rates = 10_000 ** -(torch.arange(dim // 4) / (dim // 4))
    rows, columns = torch.meshgrid(*(torch.arange(side) for side in grid_size), indexing="ij")
    angles = [place.flatten()[:, None] * rates for place in (rows, columns)]
    return torch.cat([f(angle) for angle in angles for f in (torch.sin, torch.cos)], dim=1)


class PatchPositions(nn.Module):
    """Adds a position to each patch: learned for one grid and resized to others, or fixed sines."""

    def __init__(self, grid_size: tuple[int, int], dim: int, *, learned: bool = True):
        super().__init__()
        self.grid_size = grid_size
        num_patches = grid_size[0] * grid_size[1]
        self.table = nn.Parameter(0.02 * torch.randn(num_patches, dim)) if learned else None

    def forward(self, features: PatchFeatures) -> Tensor:
        """(B, P + N, D) tokens with the positions of the patches."""
        places = self._places(features.grid_size, features.tokens)  # (N, D)
        return features.tokens + F.pad(places, (0, 0, features.num_prefix, 0))

    def _places(self, grid_size: tuple[int, int], tokens: Tensor) -> Tensor:
        if self.table is None:
            return sine_positions(grid_size, tokens.size(-1)).to(tokens)
        if grid_size == self.grid_size:
            return self.table
        grid = self.table.T.unflatten(1, self.grid_size)[None]  # (1, D, gh, gw)
        grid = F.interpolate(grid, grid_size, mode="bicubic", antialias=True)
        return grid[0].flatten(1).T


class ViTBlock(nn.Module):
    """Self-attention and MLP, each in a pre-norm residual branch."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        mlp_ratio: float,
        activation: str,
        norm_eps: float | None,
        dropout: float,
    ):
        super().__init__()
        self.norm1, self.norm2 = (make_norm("layer", dim, norm_eps) for _ in range(2))
        self.self_attn = ScaledDotProductAttention(dim, num_heads=num_heads)
        hidden_dim = round(mlp_ratio * dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, hidden_dim), make_activation(activation), nn.Linear(hidden_dim, dim)
        )
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        query, kv = self.self_attn.project_self(self.norm1(x))
        x = x + self.dropout(self.self_attn.attend_heads(query, kv)[0])
        return x + self.dropout(self.mlp(self.norm2(x)))


class ViT(nn.Module):
    """Vision transformer over any rectangular grid of patches.

    Dosovitskiy et al., ICLR 2021; register tokens after Darcet et al., "Vision Transformers Need
    Registers", ICLR 2024.

    Args:
        image_size: (S_h, S_w) that learned positions are made for; other sizes resize them.
        patch_size: side of a patch in pixels.
        dim: width.
        depth: number of blocks.
        num_heads: attention heads.
        mlp_ratio: width of the MLP over `dim`.
        activation: of the MLP, a key of `ACTIVATIONS`.
        norm_eps: added to the variance in the norms; LayerNorm's own where omitted.
        positions: "learned" or "sine".
        num_registers: tokens without a place, which the patches may use as scratch space; a class
            token is one of them.
        keep_registers: they stand before the patches in what is returned.
        stem: patches by strided convolutions (see `PatchEmbed`).
        dropout: on each residual branch.
    """

    def __init__(
        self,
        image_size: tuple[int, int] = (224, 224),
        patch_size: int = 16,
        *,
        dim: int = 192,
        depth: int = 4,
        num_heads: int = 4,
        mlp_ratio: float = 4.0,
        activation: str = "gelu",
        norm_eps: float | None = None,
        positions: str = "learned",
        num_registers: int = 0,
        keep_registers: bool = False,
        stem: bool = False,
        dropout: float = 0.0,
    ):
        super().__init__()
        if positions not in ("learned", "sine"):
            raise ValueError(f"positions must be 'learned' or 'sine', got {positions!r}")
        self.dim, self.image_size = dim, tuple(image_size)
        self.mean = self.std = (0.5, 0.5, 0.5)
        self.patch_embed = PatchEmbed(patch_size, dim, stem=stem)
        self.grid_size = tuple(side // patch_size for side in image_size)
        self.positions = PatchPositions(self.grid_size, dim, learned=positions == "learned")
        registers = 0.02 * torch.randn(num_registers, dim)
        if num_registers:
            self.registers = nn.Parameter(registers)
        else:
            self.register_buffer("registers", registers)  # nothing to learn, or to share out
        self.num_left_out = 0 if keep_registers else num_registers
        self.blocks = nn.ModuleList(
            ViTBlock(
                dim,
                num_heads,
                mlp_ratio=mlp_ratio,
                activation=activation,
                norm_eps=norm_eps,
                dropout=dropout,
            )
            for _ in range(depth)
        )
        self.norm = make_norm("layer", dim, norm_eps)

    def forward(self, pixels: Tensor) -> PatchFeatures:
        """Pixels (B, 3, S_h, S_w) to tokens (B, P + N, D)."""
        patches = self.patch_embed(pixels)
        registers = self.registers.expand(pixels.size(0), -1, -1)
        x = torch.cat([registers, self.positions(patches)], dim=1)
        for block in self.blocks:
            x = block(x)
        return PatchFeatures(self.norm(x)[:, self.num_left_out :], patches.grid_size)


class TimmEncoder(nn.Module):
    """Any timm model as the encoder: its last feature map, without class and register tokens.

    It is frozen until `finetune` says otherwise. Batch norm keeps the statistics that it came with,
    whatever `train()` is called: those of a small batch are worse.

    Args:
        name: a name that `timm.create_model` takes.
        pretrained: load timm's weights from the hub.
        image_size: (S_h, S_w); the model's own where omitted.
        classes: a token for the whole picture stands before the patches, and after each token's
            features come the roots of the probabilities that the model's own classifier gives it;
            both are scaled to a mean square of 1.

    Raises:
        ValueError: timm has no such model, `image_size` does not suit it, or it has no classifier
            that a single patch can be given to.
    """

    def __init__(
        self,
        name: str,
        *,
        pretrained: bool = False,
        image_size: tuple[int, int] | None = None,
        classes: bool = False,
    ):
        import timm

        super().__init__()
        if not timm.is_model(name):
            raise ValueError(f"encoder 'timm:{name}' is not a model of timm {timm.__version__}")
        self.name, self.classes = name, classes
        head = {} if classes else {"num_classes": 0}
        self.model = timm.create_model(name, pretrained=pretrained, **head)
        settings = timm.data.resolve_model_data_config(self.model)
        self.mean, self.std = tuple(settings["mean"]), tuple(settings["std"])
        own_size = tuple(settings["input_size"][-2:])
        self.image_size = own_size if image_size is None else tuple(image_size)
        try:
            if self.image_size != own_size and hasattr(self.model, "set_input_size"):
                self.model.set_input_size(img_size=self.image_size)
            features = self._probe()
        except (AssertionError, RuntimeError) as error:
            raise ValueError(
                f"image_size {self.image_size} does not suit timm:{name}: {error}"
            ) from error
        self.dim, self.grid_size = features.tokens.size(-1), features.grid_size
        patch_size = self.model.feature_info[-1]["reduction"]
        seen = tuple(patch_size * cells for cells in self.grid_size)
        if self.image_size != own_size and any(a < b for a, b in zip(seen, self.image_size)):
            raise ValueError(
                f"image_size {self.image_size} does not suit timm:{name}: its patches of "
                f"{patch_size} pixels cover {seen}"
            )
        self.model.to(memory_format=torch.channels_last)
        self.finetune(0)

    @torch.no_grad()
    def _probe(self) -> PatchFeatures:
        """What a blank picture gives, and whether the model is a convolutional network."""
        pixels = torch.zeros(1, 3, *self.image_size)
        features = self.model.eval().forward_features(pixels)
        # forward_intermediates leaves out the last convolution that some networks have.
        self._convolutional = features.dim() == 4 and features.size(1) == self.model.num_features
        if self.classes and not (self._convolutional and self.model.num_classes):
            raise ValueError(
                f"classes need a convolutional network with a classifier, got timm:{self.name}"
            )
        return self(pixels)

    def finetune(self, stages: int) -> None:
        """Let the last stages, or blocks of a transformer, learn from now on, and no others.

        The classifier is none of them.

        Raises:
            ValueError: timm does not tell the stages of this model.
        """
        learning = set()
        if stages:
            from timm.models import group_parameters

            if (stage_of := getattr(self.model, "group_matcher", None)) is None:
                raise ValueError(f"timm does not tell the stages of {self.name}: it cannot learn")
            groups = group_parameters(self.model, stage_of(coarse=True)).values()
            heads = tuple(f"{name.split('.')[0]}." for name in self._classifier_names())
            groups = [{name for name in group if not name.startswith(heads)} for group in groups]
            learning.update(*list(filter(None, groups))[-stages:])
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name in learning)
        self.frozen = not learning

    def train(self, mode: bool = True) -> "TimmEncoder":
        super().train(mode)
        self.model.eval()
        return self

    def forward(self, pixels: Tensor) -> PatchFeatures:
        """Pixels (B, 3, S_h, S_w) to tokens (B, P + N, D)."""
        pixels = pixels.contiguous(memory_format=torch.channels_last)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            if self._convolutional:
                grid = self.model.forward_features(pixels)  # (B, D, gh, gw)
            else:
                (grid,) = self.model.forward_intermediates(
                    pixels, indices=1, norm=True, output_fmt="NCHW", intermediates_only=True
                )
            tokens = grid.flatten(2).transpose(1, 2)  # (B, N, D)
            if self.classes:
                tokens = self._with_classes(tokens)
        return PatchFeatures(tokens, tuple(grid.shape[-2:]))

    def _with_classes(self, tokens: Tensor) -> Tensor:
        """The picture, as the mean of its patches, and each of these are classified."""
        tokens = torch.cat([tokens.mean(1, keepdim=True), tokens], dim=1)  # (B, 1 + N, D)
        maps = tokens.flatten(0, 1)[:, :, None, None]
        logits = self.model.forward_head(maps)  # (B * (1 + N), classes)
        roots = (logits.float().log_softmax(-1) / 2).exp() * logits.size(-1) ** 0.5
        features = F.layer_norm(tokens, tokens.shape[-1:])
        return torch.cat([features, roots.to(features).unflatten(0, tokens.shape[:2])], dim=-1)

    def _classifier_names(self) -> tuple[str, ...]:
        names = self.model.pretrained_cfg.get("classifier") or ()
        return (names,) if isinstance(names, str) else tuple(names)

    def load_weights(self, path: str | Path) -> None:
        """Load the encoder's weights from a safetensors file with timm's names.

        A classifier's weights in it are left out where it is not wanted.

        Raises:
            ValueError: the file cannot be read, or does not fit this model.
        """
        try:
            tensors = load_file(path)
            missing, foreign = self.model.load_state_dict(tensors, strict=False)
        except (OSError, SafetensorError, RuntimeError) as error:
            reason = str(error).splitlines()[-1].strip()
            raise ValueError(f"cannot load encoder weights from {path}: {reason}") from error
        heads = tuple(f"{name}." for name in self._classifier_names())
        foreign = [name for name in foreign if not name.startswith(heads)]
        if missing or foreign:
            raise ValueError(
                f"encoder weights {path} do not fit {self.name}: {len(missing)} tensors missing, "
                f"{len(foreign)} foreign ({', '.join([*missing, *foreign][:3])})"
            )
