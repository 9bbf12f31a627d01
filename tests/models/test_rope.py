"""Rotary positions of every convention, against loops over patches and pairs."""

import math

import pytest
import torch
from torch import Tensor, nn

from helpers.vit_options import BASE, make_vit
from patchword.config import ViTConfig
from patchword.models.rope import Rotary, make_rotary

PERIODS = (1.5, 4.0, 9.0, 20.0)
CONFIGS = {
    "patchword": BASE.replace(pos_embed="rotary"),
    "eva02": BASE.replace(pos_embed="learned+rotary", rope="eva02"),
    "eva02, reference": BASE.replace(pos_embed="learned+rotary", rope="eva02", rope_reference=(7, 3)),
    "pe": BASE.replace(pos_embed="learned+rotary", rope="pe"),
    "pe, reference": BASE.replace(pos_embed="learned+rotary", rope="pe", rope_reference=(7, 3)),
    "pe, no class token": BASE.replace(
        pos_embed="learned+rotary", rope="pe", class_token=False, pooling="average", rope_base=50.0
    ),
    "axial": BASE.replace(pos_embed="rotary", rope="axial", num_registers=2),
    "dinov3": BASE.replace(pos_embed="rotary", rope="dinov3", num_registers=4),
    "dinov3, periods": BASE.replace(pos_embed="rotary", rope="dinov3", rope_periods=PERIODS),
    "base": BASE.replace(pos_embed="rotary", rope="axial", rope_base=30.0),
    "mixed": BASE.replace(pos_embed="rotary", rope="mixed"),
}
BASES = {"patchword": 100.0, "eva02": 10_000.0, "pe": 10_000.0, "axial": 100.0, "dinov3": 100.0}


def make_random_rotary(config: ViTConfig) -> nn.Module:
    torch.manual_seed(0)
    rotary = make_rotary(config)
    for parameter in rotary.parameters():  # of "mixed"
        nn.init.normal_(parameter)
    return rotary


def expected_angle(
    config: ViTConfig, rotary: nn.Module, head: int, pair: int, place: tuple[int, int, int, int]
) -> float:
    """The angle of one pair at a row and a column of a grid, as the projects define it."""
    row, column, height, width = place
    if config.rope == "mixed":
        of_column, of_row = rotary.frequencies[:, head, pair].tolist()
        return column * of_column + row * of_row
    quarter = config.attention_dim // 4
    j = pair % quarter
    columns_first = config.rope in ("pe", "axial")
    of_row = (pair < quarter) != columns_first
    index, length = (row, height) if of_row else (column, width)
    period = (config.rope_base or BASES[config.rope]) ** (j / quarter)
    if config.rope_periods:
        period = config.rope_periods[j]
    if config.rope == "dinov3":
        return 2 * math.pi * (2 * (index + 0.5) / length - 1) / period
    if config.rope == "pe" and config.class_token:
        index += 1
    reference = config.rope_reference[0 if of_row else 1] if config.rope_reference else length
    return index * reference / length / period


def rotated_by_loops(config: ViTConfig, rotary: nn.Module, x: Tensor, grid: tuple[int, int]) -> Tensor:
    """Rotates every pair of every patch by itself."""
    result, half = x.clone().double(), config.attention_dim // 2
    for head in range(x.shape[1]):
        for patch in range(grid[0] * grid[1]):
            token = config.num_prefix + patch
            for pair in range(half):
                neighbors = config.rope not in ("patchword", "dinov3")
                first, second = (2 * pair, 2 * pair + 1) if neighbors else (pair, pair + half)
                angle = expected_angle(config, rotary, head, pair, (*divmod(patch, grid[1]), *grid))
                a, b = x[:, head, token, first].double(), x[:, head, token, second].double()
                result[:, head, token, first] = a * math.cos(angle) - b * math.sin(angle)
                result[:, head, token, second] = a * math.sin(angle) + b * math.cos(angle)
    return result.float()


def queries(config: ViTConfig, grid: tuple[int, int]) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, config.num_heads, config.num_prefix + grid[0] * grid[1], config.attention_dim)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("grid", [(4, 4), (2, 5)], ids=str)
@torch.no_grad()
def test_rotation_matches_the_definition(config: ViTConfig, grid: tuple[int, int]) -> None:
    """On the model's grid, 4 x 4, and on another one; prefix tokens do not change by a single bit."""
    rotary, x, k = make_random_rotary(config), queries(config, grid), config.num_prefix
    found = rotary(x, grid)
    torch.testing.assert_close(found, rotated_by_loops(config, rotary, x, grid), rtol=1e-5, atol=1e-5)
    assert torch.equal(found[:, :, :k], x[:, :, :k])
    assert (found[:, :, k + 1 :] - x[:, :, k + 1 :]).abs().max() > 0.1
    if grid == config.grid:
        assert torch.equal(rotary(x), found)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("grid", [(4, 4), (3, 5)], ids=str)
@torch.no_grad()
def test_scores_depend_on_offsets_only(config: ViTConfig, grid: tuple[int, int]) -> None:
    """The score of two patches with the same contents does not change if both move by one row and one column."""
    (h, w), rotary, k = grid, make_random_rotary(config), config.num_prefix
    torch.manual_seed(2)
    q, key = (torch.randn(1, config.num_heads, 1, config.attention_dim).expand(-1, -1, k + h * w, -1) for _ in range(2))
    scores = (rotary(q, grid) @ rotary(key, grid).mT)[0]
    between = scores[:, k:, k:].view(-1, h, w, h, w)
    torch.testing.assert_close(between[:, :-1, :-1, :-1, :-1], between[:, 1:, 1:, 1:, 1:], rtol=1e-4, atol=1e-4)
    right, left, below = between[:, 1, 1, 1, 2], between[:, 1, 1, 1, 0], between[:, 1, 1, 2, 1]
    assert min((a - b).abs().max() for a, b in ((right, left), (right, below), (left, below))) > 1e-3


@torch.no_grad()
def test_only_queries_and_keys_are_rotated() -> None:
    attention = make_vit(pos_embed="rotary", rope="axial").blocks[0].attention
    x = torch.randn(2, 17, 48)
    q, k, v = (t.view(2, 17, 3, 16).transpose(1, 2) for t in attention.qkv(x).chunk(3, dim=-1))
    found = attention.project(x)
    for rotated, expected in zip(found, (attention.rotary(q), attention.rotary(k), v), strict=True):
        assert torch.equal(rotated, expected)
    assert not torch.equal(found[1], k)


@torch.no_grad()
def test_reference_grid_keeps_the_coordinates_of_other_image_sizes() -> None:
    """A patch at the same place of an image of twice the size has the same angles."""
    for rope in ("eva02", "pe"):
        config = BASE.replace(
            pos_embed="learned+rotary", rope=rope, rope_reference=(4, 4), class_token=False, pooling="average"
        )
        small, large = Rotary(config), Rotary(config.replace(image_size=64))
        assert torch.equal(large.cos.view(8, 8, -1)[::2, ::2], small.cos.view(4, 4, -1))
        unscaled = Rotary(config.replace(image_size=64, rope_reference=None))
        torch.testing.assert_close(unscaled.sin.view(8, 8, -1)[:4, :4], small.sin.view(4, 4, -1))


@torch.no_grad()
def test_stored_periods_replace_the_base() -> None:
    computed = CONFIGS["dinov3"]
    stored = computed.replace(rope_periods=tuple(100 ** (j / 4) for j in range(4)))
    x = queries(computed, (4, 4))
    torch.testing.assert_close(make_rotary(stored)(x), make_rotary(computed)(x))
    rounded = stored.replace(rope_periods=tuple(torch.tensor(stored.rope_periods).bfloat16().tolist()))
    assert (make_rotary(rounded)(x) - make_rotary(computed)(x)).abs().max() > 1e-3


def test_mixed_frequencies_are_learned_in_each_head() -> None:
    """New models: half of the pairs of a head look in one direction, the others at a right angle to it."""
    model = make_vit(pos_embed="rotary", rope="mixed")
    rotary = model.blocks[0].attention.rotary
    rotary.reset()
    columns, rows = rotary.frequencies.detach()  # (heads, pairs)
    magnitudes = torch.hypot(columns, rows)
    falling = torch.tensor([10 ** (-j / 4) for j in (0, 0, 1, 1, 2, 2, 3, 3)])
    torch.testing.assert_close(magnitudes, falling.expand(3, -1))
    torch.testing.assert_close(columns[:, ::2] * columns[:, 1::2] + rows[:, ::2] * rows[:, 1::2], torch.zeros(3, 4))
    assert columns[:, 0].unique().numel() == 3, "each head has its own direction"
    model(torch.randn(1, 3, 32, 32)).sum().backward()
    assert rotary.frequencies.grad.abs().min() > 0


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_training_in_bf16_stays_in_bf16(config: ViTConfig) -> None:
    """With queries in float32, attention would leave its fast path (cpu.py)."""
    rotary, x = make_random_rotary(config), queries(config, (4, 4))
    rounded = rotary(x.bfloat16())
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), rotary(x), atol=0.05, rtol=0.02)


def test_buffers_follow_the_image_size() -> None:
    """Tables are not stored, so that a checkpoint fits every image size."""
    model = make_vit(pos_embed="rotary", rope="dinov3", image_size=(32, 48))
    rotary = model.blocks[0].attention.rotary
    assert rotary.cos.shape == (4 * 6, 8)
    assert not [name for name in model.state_dict() if "rotary" in name]
