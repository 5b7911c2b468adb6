"""Pictures to patch tokens: which patch stands where, and who may learn."""

import functools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from vlattn.encoder import PatchEmbed, PatchFeatures, PatchPositions, TimmEncoder, ViT
from vlattn.images import Preprocess

B = 2


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def vit(image_size: tuple[int, int] = (8, 12), **options) -> ViT:
    return ViT(image_size, 4, **{"dim": 24, "depth": 2, "num_heads": 3, **options}).eval()


# Patches


def test_patches_are_projected_one_by_one_row_by_row():
    embed = PatchEmbed(4, 5, in_channels=3)
    pixels = torch.randn(B, 3, 8, 12)
    tokens, grid_size = embed(pixels)
    expected = []
    for row in range(2):
        for column in range(3):
            patch = pixels[:, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
            expected.append(
                [(embed.proj.weight * p).sum((1, 2, 3)) + embed.proj.bias for p in patch]
            )
    expected = torch.stack([torch.stack(samples) for samples in expected], dim=1)
    assert grid_size == (2, 3) and tokens.shape == (B, 6, 5)
    torch.testing.assert_close(tokens, expected)


@pytest.mark.parametrize("image_size, grid_size", [((8, 16), (2, 4)), ((16, 8), (4, 2))])
def test_wide_and_tall_pictures_have_their_own_grids(image_size, grid_size):
    """Elsewhere the grid was the square root of the number of tokens, or rows and columns swapped:
    here a bright patch in the first row and the last column is the token of that place."""
    model = vit(image_size, depth=1)
    dark = torch.randn(9, 3, *image_size)
    bright = dark.clone()
    bright[:, :, :4, -4:] += 3
    moved = (model(bright).tokens - model(dark).tokens).norm(dim=-1).mean(0)  # (N,)
    assert model.grid_size == model(dark).grid_size == grid_size
    assert divmod(int(moved.argmax()), grid_size[1]) == (0, grid_size[1] - 1)


@pytest.mark.parametrize("patch_size", [2, 4, 8])
def test_stem_has_the_grid_of_its_patch_size(patch_size):
    tokens, grid_size = PatchEmbed(patch_size, 20, stem=True)(torch.randn(B, 3, 16, 24))
    assert grid_size == (16 // patch_size, 24 // patch_size)
    assert tokens.shape == (B, math.prod(grid_size), 20)


def test_pictures_that_are_not_whole_patches_are_refused():
    for shape in ((B, 3, 9, 12), (B, 3, 8, 13), (3, 8, 12)):
        with pytest.raises(ValueError, match=r"pixels must have .* patch_size=4, got \(") as error:
            vit()(torch.zeros(shape))
        assert str(error.value).endswith(f"got {shape}")


@pytest.mark.parametrize("patch_size", [1, 6])
def test_stem_of_other_than_a_power_of_two_is_refused(patch_size):
    with pytest.raises(ValueError, match=f"power of two above 1, got {patch_size}"):
        PatchEmbed(patch_size, 20, stem=True)


# Positions


def test_learned_positions_are_added_place_by_place():
    positions = PatchPositions((2, 3), 20)
    tokens = torch.randn(B, 6, 20)
    expected = tokens + positions.table
    torch.testing.assert_close(positions(PatchFeatures(tokens, (2, 3))), expected)


@pytest.mark.parametrize("grid_size", [(4, 6), (6, 4), (5, 7), (1, 3), (3, 2)])
def test_learned_positions_resize_to_other_grids(grid_size):
    """Elsewhere odd sizes were rounded to another grid: here what depends on the row alone still
    does, and grows from the top to the bottom; the same for columns."""
    positions = PatchPositions((2, 3), 2)
    place = torch.cartesian_prod(torch.arange(2.0), torch.arange(3.0))
    positions.table.data.copy_(place)
    tokens = torch.zeros(B, math.prod(grid_size), 2)
    placed = positions(PatchFeatures(tokens, grid_size)).unflatten(1, grid_size)[0]
    rows, columns = placed[..., 0], placed[..., 1]
    torch.testing.assert_close(rows, rows[:, :1].expand_as(rows))
    torch.testing.assert_close(columns, columns[:1].expand_as(columns))
    assert (rows[:, 0].diff() > 0).all() and (columns[0].diff() > 0).all()
    torch.testing.assert_close(placed.mean((0, 1)), place.mean(0))


@pytest.mark.parametrize("grid_size", [(2, 3), (4, 2)])
def test_sine_positions_tell_row_and_column(grid_size):
    positions = PatchPositions((2, 3), 8, learned=False)
    placed = positions(PatchFeatures(torch.zeros(B, math.prod(grid_size), 8), grid_size))[1]
    for token, numbers in enumerate(placed):
        row, column = divmod(token, grid_size[1])
        expected = [
            f(place / 100**i)
            for place in (row, column)
            for f in (math.sin, math.cos)
            for i in (0, 1)
        ]
        torch.testing.assert_close(numbers, torch.tensor(expected))
    assert not list(positions.parameters())


def test_learned_positions_take_any_width_and_sines_a_multiple_of_four():
    """Learned tables were once made from a table of sines, and refused widths that it has not."""
    assert PatchPositions((2, 3), 18).table.shape == (6, 18)
    with pytest.raises(ValueError, match="must be divisible by 4, got 18"):
        vit(dim=18, positions="sine")(torch.zeros(1, 3, 8, 12))


# ViT


@pytest.mark.parametrize("image_size", [(8, 12), (12, 20)])
@pytest.mark.parametrize(
    "options", [{}, {"positions": "sine"}, {"stem": True}, {"num_registers": 5}]
)
def test_vit_takes_any_grid_and_returns_its_patches_alone(options, image_size):
    """Registers are read by the patches, and are not among the tokens."""
    model = vit(**options)
    pixels = torch.randn(B, 3, *image_size)
    tokens, grid_size = model(pixels)
    assert grid_size == (image_size[0] // 4, image_size[1] // 4)
    assert tokens.shape == (B, math.prod(grid_size), model.dim)
    torch.testing.assert_close(model(pixels[1:]).tokens, tokens[1:])
    if "num_registers" in options:
        assert model.registers.shape == (5, 24)
        model.registers.data += 1
        assert not torch.allclose(model(pixels).tokens, tokens)


def test_vit_block_is_pytorchs_encoder_layer():
    model = vit(depth=1).double()
    block = model.blocks[0]
    theirs = nn.TransformerEncoderLayer(
        24, 3, 96, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    ).double()
    attn = block.self_attn
    projections = (attn.q_proj, attn.k_proj, attn.v_proj)
    theirs.load_state_dict(
        {
            "self_attn.in_proj_weight": torch.cat([linear.weight for linear in projections]),
            "self_attn.in_proj_bias": torch.cat([linear.bias for linear in projections]),
            **{f"self_attn.out_proj.{k}": v for k, v in attn.out_proj.state_dict().items()},
            **{f"linear1.{k}": v for k, v in block.mlp[0].state_dict().items()},
            **{f"linear2.{k}": v for k, v in block.mlp[2].state_dict().items()},
            **{f"norm1.{k}": v for k, v in block.norm1.state_dict().items()},
            **{f"norm2.{k}": v for k, v in block.norm2.state_dict().items()},
        }
    )
    pixels = torch.randn(B, 3, 8, 12, dtype=torch.float64)
    expected = model.norm(theirs(model.positions(model.patch_embed(pixels))))
    torch.testing.assert_close(model(pixels).tokens, expected)


@pytest.mark.parametrize("stem", [False, True])
def test_every_parameter_of_a_vit_gets_a_gradient(stem):
    model = vit(stem=stem, num_registers=2)
    model(torch.randn(B, 3, 8, 12)).tokens.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all() and parameter.grad.abs().max() > 0, name


def test_two_vits_with_one_seed_are_equal_and_finite():
    builds = []
    for _ in range(2):
        torch.manual_seed(5)
        builds.append(vit(num_registers=2, stem=True).state_dict())
    for name, tensor in builds[0].items():
        assert torch.equal(tensor, builds[1][name]) and tensor.isfinite().all(), name


def test_dropout_of_a_vit_is_off_in_eval():
    model, pixels = vit(dropout=0.5), torch.randn(B, 3, 8, 12)
    assert torch.equal(model(pixels).tokens, model(pixels).tokens)
    model.train()
    assert not torch.allclose(model(pixels).tokens, model(pixels).tokens)


def test_unknown_positions_are_refused():
    with pytest.raises(ValueError, match="positions must be 'learned' or 'sine', got 'rotary'"):
        vit(positions="rotary")


# timm

MODELS = {  # name: (image size, prefix tokens, width)
    "resnet18": ((64, 96), 0, 512),
    "vit_relpos_small_patch16_224": ((32, 48), 0, 384),
    "vit_tiny_patch16_224": ((32, 48), 1, 192),
    "swin_tiny_patch4_window7_224": ((64, 96), 0, 768),
    "convnext_atto": ((64, 96), 0, 320),
    "tf_efficientnet_lite0": ((64, 96), 0, 1280),
    "vit_small_patch14_reg4_dinov2": ((28, 42), 5, 384),
}
# timm's own resizing of Swin's position biases warns.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:timm")


@functools.cache
def timm_encoder(name: str) -> TimmEncoder:
    return TimmEncoder(name, image_size=MODELS[name][0])


def last_map(model: nn.Module, pixels: Tensor, prefix: int, dim: int) -> Tensor:
    """timm's features as (B, N, D), in whatever layout the family has them."""
    features = model.forward_features(pixels)
    if features.dim() == 3:
        return features[:, prefix:]
    if features.size(-1) == dim:
        return features.flatten(1, 2)
    return features.flatten(2).transpose(1, 2)


@pytest.mark.parametrize("name", MODELS)
def test_timm_models_give_their_last_map_without_prefix_tokens(name):
    """Elsewhere class or register tokens were left in the map, and shifted it."""
    (height, width), prefix, dim = MODELS[name]
    encoder = timm_encoder(name)
    assert encoder.image_size == (height, width)
    assert encoder.grid_size == (2, 3) and encoder.dim == dim
    assert getattr(encoder.model, "num_prefix_tokens", 0) == prefix
    pixels = torch.randn(B, 3, height, width)
    tokens, grid_size = encoder(pixels)
    assert grid_size == (2, 3) and tokens.shape == (B, 6, dim)
    with torch.no_grad():
        torch.testing.assert_close(tokens, last_map(encoder.model, pixels, prefix, dim))
    torch.testing.assert_close(encoder(pixels[1:]).tokens, tokens[1:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["squeeze", "crop", "pad"])
@pytest.mark.parametrize("name", ["own", "own-registers", *MODELS])
def test_the_patch_that_saw_a_spot_is_drawn_on_the_spot(name, mode):
    """From picture to overlay, for each family: maps were off by the class token, turned, or where
    the spot was in the resized picture (I1, I2)."""
    if name.startswith("own"):
        torch.manual_seed(0)
        encoder = ViT((32, 48), 16, dim=32, depth=1, num_registers=4 * (name != "own")).eval()
    else:
        encoder = timm_encoder(name)
    scale = 5 if name in ("resnet18", "tf_efficientnet_lite0") else 1  # each patch sees far around
    size = tuple(scale * side for side in encoder.image_size)
    preprocess = Preprocess(size, mode, encoder.mean, encoder.std)
    width, height = (240, 100) if mode == "pad" else (150, 120)
    dark = Image.new("RGB", (width, height))
    rows, columns = encoder.grid_size
    _, geometry = preprocess(dark)
    left, top, right, bottom = geometry.box
    down, across = (bottom - top) / rows, (right - left) / columns
    for row, column in ((0, columns - 1), (rows - 1, 0)):
        x, y = left + (column + 0.5) * across, top + (row + 0.5) * down
        y = min(max(y, 0.2 * height), 0.8 * height)  # a padded border has no picture
        spot = dark.copy()
        spot.paste("white", tuple(map(round, (x - 9, y - 9, x + 9, y + 9))))
        seen, unseen = (encoder(preprocess(image)[0][None]).tokens[0] for image in (spot, dark))
        moved = (seen - unseen).detach().norm(dim=-1)
        moved = moved.view(rows, scale, columns, scale).mean((1, 3)).flatten()
        one_hot = torch.zeros(rows * columns).index_fill_(0, moved.argmax(), 1)
        heat = geometry.to_image(one_hot.view(rows, columns))
        assert np.isnan(heat).any() == (mode == "crop")
        peak_y, peak_x = np.unravel_index(np.nanargmax(heat), heat.shape)
        assert abs(peak_x - x) <= across / 2 + 1 and abs(peak_y - y) <= down / 2 + 1


@pytest.mark.parametrize("image_size", [(64, 128), (128, 64)])
@pytest.mark.parametrize("name", ["test_vit", "test_resnet"])
def test_wide_and_tall_pictures_through_timm(name, image_size):
    encoder = TimmEncoder(name, image_size=image_size)
    rows, columns = encoder.grid_size
    assert (columns > rows) == (image_size[1] > image_size[0])
    dark, bright = torch.zeros(1, 3, *image_size), torch.zeros(1, 3, *image_size)
    bright[:, :, : image_size[0] // rows, -image_size[1] // columns :] = 3
    moved = (encoder(bright).tokens - encoder(dark).tokens)[0].norm(dim=-1)
    assert divmod(int(moved.argmax()), columns) == (0, columns - 1)


def test_timm_models_bring_their_own_size_and_colours():
    encoder = TimmEncoder("test_vit")
    assert encoder.image_size == (160, 160) and encoder.grid_size == (10, 10)
    assert encoder.mean == tuple(encoder.model.pretrained_cfg["mean"])
    assert encoder.std == tuple(encoder.model.pretrained_cfg["std"])


def test_frozen_means_frozen():
    """Batch norm's statistics and dropout do not care for gradients: they go by the mode, and a
    training loop calls `train()` on the whole model."""
    convolutional = TimmEncoder("test_resnet", image_size=(32, 48))
    transformer = TimmEncoder("test_vit", image_size=(32, 48))
    for module in transformer.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    for encoder in (convolutional, transformer):
        model = nn.ModuleDict({"encoder": encoder, "other": nn.Linear(3, 5)})
        before = {name: x.clone() for name, x in encoder.state_dict().items()}
        pixels = torch.randn(B, 3, 32, 48, requires_grad=True)
        expected = encoder(pixels).tokens
        for _ in range(3):
            model.train(True)
            tokens = encoder(pixels).tokens
            assert torch.equal(tokens, expected) and not tokens.requires_grad
        assert not any(parameter.requires_grad for parameter in encoder.parameters())
        assert not any(module.training for module in encoder.model.modules())
        for name, x in encoder.state_dict().items():
            assert torch.equal(x, before[name]), name


@pytest.mark.parametrize(
    "stages, learning",
    [
        (0, ()),
        (2, ("layer3", "layer4")),
        (99, ("conv1", "bn1", "layer1", "layer2", "layer3", "layer4")),
    ],
)
def test_the_last_stages_learn(stages, learning):
    """Of these alone the weights, also after more or fewer did; batch norm's statistics stay."""
    encoder = TimmEncoder("test_resnet", image_size=(32, 48)).train()
    encoder.finetune(1)
    encoder.finetune(stages)
    before = {name: x.clone() for name, x in encoder.model.named_buffers()}
    tokens = encoder(torch.randn(B, 3, 32, 48)).tokens
    assert tokens.requires_grad == bool(learning) == (not encoder.frozen)
    if learning:
        tokens.square().sum().backward()
    for name, parameter in encoder.model.named_parameters():
        learns = name.startswith(learning)
        assert (parameter.grad is not None) == learns, name
        assert not learns or parameter.grad.isfinite().all(), name
    for name, x in encoder.model.named_buffers():
        assert torch.equal(x, before[name]), name
    assert not any(module.training for module in encoder.model.modules())
    encoder.eval()
    assert not any(module.training for module in encoder.modules())


def test_a_model_whose_stages_are_not_known_stays_frozen():
    encoder = TimmEncoder("test_resnet", image_size=(32, 48))
    encoder.model.group_matcher = None
    with pytest.raises(ValueError, match="timm does not tell the stages of test_resnet"):
        encoder.finetune(1)


def test_names_that_timm_has_not_are_refused():
    with pytest.raises(ValueError, match="encoder 'timm:resnet19' is not a model of timm"):
        TimmEncoder("resnet19")


@pytest.mark.parametrize("name", ["test_vit", "vit_tiny_patch16_224", "test_maxvit"])
def test_sizes_that_do_not_suit_a_model_are_refused(name):
    """Some families cut off what is left of a last patch: the map would be that of a smaller
    picture, drawn over the whole."""
    with pytest.raises(ValueError, match=rf"image_size \(33, 47\) does not suit timm:{name}: "):
        TimmEncoder(name, image_size=(33, 47))
    assert TimmEncoder("test_resnet", image_size=(33, 47)).grid_size == (2, 2)


# What a timm model's own classifier sees


@pytest.mark.parametrize("name", ["resnet18", "convnext_atto", "tf_efficientnet_lite0"])
def test_the_picture_and_each_patch_are_classified(name, tmp_path):
    """As the whole model classifies a picture whose map is that one patch, and the picture; the
    probabilities come back from what stands after the features."""
    import timm

    (height, width), _, dim = MODELS[name]
    whole = timm.create_model(name).eval()
    save(whole, tmp_path / "model.safetensors")
    encoder = TimmEncoder(name, image_size=(height, width), classes=True)
    encoder.load_weights(tmp_path / "model.safetensors")
    pixels = torch.randn(B, 3, height, width)
    features = encoder(pixels)
    assert features.grid_size == encoder.grid_size == (2, 3) and features.num_prefix == 1
    assert features.tokens.shape == (B, 1 + 6, dim + 1000) and encoder.dim == dim + 1000
    with torch.no_grad():
        grid = whole.forward_features(pixels)
        for picture in range(B):
            patches = [grid[picture, :, row, column] for row in range(2) for column in range(3)]
            for token, patch in zip(features.tokens[picture], [sum(patches) / 6, *patches]):
                centred = patch - patch.mean()
                expected = centred / (centred.square().mean() + 1e-5).sqrt()
                torch.testing.assert_close(token[:dim], expected, rtol=1e-4, atol=1e-4)
                logits = whole.forward_head(patch[None, :, None, None])[0]
                torch.testing.assert_close(token[dim:].square() / 1000, logits.softmax(0))
        logits = whole(pixels)
    torch.testing.assert_close(features.tokens[:, 0, dim:].square() / 1000, logits.softmax(1))


def test_a_classifier_that_is_sure_has_gradients():
    """The gradient of a square root is infinite at zero, where a probability underflows."""
    encoder = TimmEncoder("test_resnet", image_size=(32, 48), classes=True)
    encoder.finetune(99)
    encoder.model.fc.weight.data *= 1e4
    tokens = encoder(torch.randn(B, 3, 32, 48)).tokens
    assert (tokens[..., -encoder.model.num_classes :] == 0).any()
    tokens.square().sum().backward()
    learning = [parameter for parameter in encoder.parameters() if parameter.requires_grad]
    assert learning and all(parameter.grad.isfinite().all() for parameter in learning)


@pytest.mark.parametrize("name", ["test_vit", "swin_tiny_patch4_window7_224"])
def test_classes_without_a_classifier_of_patches_are_refused(name):
    message = f"convolutional network with a classifier, got timm:{name}"
    with pytest.raises(ValueError, match=message):
        TimmEncoder(name, classes=True)


# timm weights from a file


def save(model: nn.Module, path: Path, **more: Tensor) -> None:
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file({**state, **more}, path)


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_convnext", "test_efficientnet"])
def test_weights_of_a_whole_classifier_load(name, tmp_path):
    """The classifier's name in timm is a word for most ("fc"), and was once taken for its letters,
    so that no whole model's file was accepted."""
    import timm

    whole = timm.create_model(name).eval()
    save(whole, tmp_path / "model.safetensors")
    encoder = TimmEncoder(name)
    encoder.load_weights(tmp_path / "model.safetensors")
    pixels = torch.randn(B, 3, *encoder.image_size)
    with torch.no_grad():
        expected = last_map(whole, pixels, getattr(whole, "num_prefix_tokens", 0), encoder.dim)
    torch.testing.assert_close(encoder(pixels).tokens, expected)


def test_weights_without_a_classifier_load(tmp_path):
    one, other = (TimmEncoder("test_resnet", image_size=(32, 48)) for _ in range(2))
    save(one.model, tmp_path / "model.safetensors")
    pixels = torch.randn(B, 3, 32, 48)
    assert not torch.allclose(one(pixels).tokens, other(pixels).tokens)
    other.load_weights(str(tmp_path / "model.safetensors"))
    torch.testing.assert_close(one(pixels).tokens, other(pixels).tokens)


def test_weights_without_the_classifier_that_is_wanted_are_refused(tmp_path):
    save(TimmEncoder("test_resnet").model, tmp_path / "model.safetensors")
    encoder = TimmEncoder("test_resnet", classes=True)
    with pytest.raises(ValueError, match=r"do not fit test_resnet: 2 tensors missing, 0 .*\(fc\."):
        encoder.load_weights(tmp_path / "model.safetensors")


def test_files_that_are_not_these_weights_are_refused(tmp_path):
    """Elsewhere a tolerant load left random weights in place and said nothing."""
    encoder = TimmEncoder("test_vit", image_size=(32, 48))
    with pytest.raises(ValueError, match=r"cannot load encoder weights from .*none\.safetensors: "):
        encoder.load_weights(tmp_path / "none.safetensors")

    torch.save(encoder.model.state_dict(), tmp_path / "pickle.bin")
    with pytest.raises(ValueError, match=r"cannot load encoder weights from .*pickle\.bin: "):
        encoder.load_weights(tmp_path / "pickle.bin")

    foreign = TimmEncoder("test_resnet").model
    save(foreign, tmp_path / "foreign.safetensors")
    number = len(foreign.state_dict())
    message = rf"do not fit test_vit: \d+ tensors missing, {number} foreign \(cls_token, "
    with pytest.raises(ValueError, match=message):
        encoder.load_weights(tmp_path / "foreign.safetensors")

    save(encoder.model, tmp_path / "extra.safetensors", **{"header.weight": torch.zeros(3)})
    message = r"do not fit test_vit: 0 tensors missing, 1 foreign \(header.weight\)"
    with pytest.raises(ValueError, match=message):
        encoder.load_weights(tmp_path / "extra.safetensors")


def test_position_table_of_another_size_is_refused_by_name(tmp_path):
    encoder = TimmEncoder("test_vit", image_size=(32, 48))
    save(TimmEncoder("test_vit").model, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"cannot load .*: size mismatch for pos_embed: "):
        encoder.load_weights(tmp_path / "model.safetensors")


@torch.no_grad()
def test_registers_that_are_kept_stand_before_the_patches():
    torch.manual_seed(0)
    options = {"dim": 24, "depth": 2, "num_heads": 3, "num_registers": 5}
    kept = ViT((24, 40), 8, keep_registers=True, **options).eval()
    left_out = ViT((24, 40), 8, **options).eval()
    left_out.load_state_dict(kept.state_dict())
    pixels = torch.randn(2, 3, 24, 40)
    features, patches = kept(pixels), left_out(pixels)
    assert features.num_prefix == 5 and patches.num_prefix == 0
    assert features.tokens.shape == (2, 5 + 3 * 5, 24) and features.grid_size == (3, 5)
    assert torch.equal(features.tokens[:, 5:], patches.tokens)
    # Positions are added to the patches alone.
    positions = PatchPositions((3, 5), 24)
    placed = positions(features)
    assert torch.equal(placed[:, :5], features.tokens[:, :5])
    assert torch.equal(placed[:, 5:], positions(patches))
