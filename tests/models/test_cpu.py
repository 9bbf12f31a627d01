"""A model optimized for CPUs gives the same outputs as the plain model, and its hooks still work."""

import copy
import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from helpers.tiny_trainer import trainer
from helpers.vit_options import OPTIONS, make_vit, random_images
from patchword.checkpoints import Checkpoint, write_checkpoint
from patchword.config import DistillConfig
from patchword.data.preprocess import HALF, Preprocess
from patchword.engines.capabilities import probe_capabilities
from patchword.engines.exportable import ExportableModel
from patchword.engines.int8_linear import quantize_linear_layers
from patchword.inference.classifier import Classifier
from patchword.models import ViT, optimize_for_cpu
from patchword.models.attention import Attention, ScaledDotProductAttention
from patchword.models.cpu import CPUMLP, CPUAttention, CPUScaledDotProductAttention
from patchword.models.lora import add_lora
from patchword.models.token_merging import TokenMergingViT
from patchword.models.vit import MLP

needs_bf16 = pytest.mark.skipif(not probe_capabilities().bf16_works, reason="this processor cannot compute in bf16")


def make_pair(**options: object) -> tuple[ViT, ViT]:
    """The same model, plain and optimized."""
    model = make_vit(**options)
    return model, optimize_for_cpu(copy.deepcopy(model))


@pytest.mark.parametrize("option", OPTIONS)
def test_optimized_equals_plain(option: str) -> None:
    """Logits with and without gradients, bit-identical fp32 gradients, and names of tensors."""
    plain, fast = make_pair(**OPTIONS[option])
    images = random_images(plain)
    assert any(isinstance(m, CPUAttention) for m in fast.modules())
    assert list(fast.state_dict()) == list(plain.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(fast(images), plain(images), rtol=1e-5, atol=2e-5)
    logits, expected = fast(images), plain(images)
    assert torch.equal(logits, expected)
    logits.square().sum().backward()
    expected.square().sum().backward()
    for (name, a), b in zip(fast.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name  # type: ignore[arg-type]


@needs_bf16
@pytest.mark.parametrize(
    "option", ["plain", "relative", "axial", "local", "rotary", "map", "rope mixed", "key_bias", "sub-LN"]
)
def test_training_in_bf16_equals_the_fused_kernel(option: str) -> None:
    """Outputs, and gradients of inputs and weights: attention with gradients is not computed by the fused kernel."""
    plain, fast = make_pair(**OPTIONS[option])
    x = torch.randn(2, plain.config.num_prefix + plain.config.num_patches, 48) * 0.3
    found = []
    for model in (plain, fast):
        inputs = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            output = model.blocks[1].attention(inputs)
        output.float().square().sum().backward()
        weights = [p.grad for p in model.blocks[1].attention.parameters()]
        found.append([output.detach().float(), inputs.grad, *weights])
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() < 0.03 * b.norm()


@needs_bf16
def test_attention_dropout_is_applied() -> None:
    """The stepwise attention has no dropout, so the fused kernel is used with dropout."""
    attend = optimize_for_cpu(make_vit(attention_dropout=0.5)).blocks[0].attention.attend.train()
    q, k = torch.randn(2, 2, 3, 17, 16, dtype=torch.bfloat16, requires_grad=True)
    v = torch.ones_like(k)
    torch.testing.assert_close(attend.eval()(q, k, v), v)  # rows of weights sum to one
    assert (attend.train()(q, k, v) - v).abs().max() > 0.3


def test_only_known_classes_are_replaced() -> None:
    """A subclass may compute something else; an attention pool has no fast path and keeps its kernel."""

    class CustomAttention(Attention):
        pass

    model = make_vit(pooling="attention")
    model.blocks[1].attention.__class__ = CustomAttention
    optimize_for_cpu(model)
    kinds = [type(block.attention) for block in model.blocks]
    assert kinds == [CPUAttention, CustomAttention, CPUAttention]
    assert type(model.blocks[1].mlp) is CPUMLP
    assert type(model.blocks[0].attention.attend) is CPUScaledDotProductAttention
    assert type(model.pool.attend) is ScaledDotProductAttention
    assert type(copy.deepcopy(model).blocks[0].attention) is CPUAttention


# Hooks

HOOKED = ("attention.qkv", "attention.attend", "attention.out", "mlp.fc1", "mlp.drop", "mlp.fc2", "mlp", "attention")


def hook_is_bypassed(kind: str, name: str, model: ViT, run: nn.Module, images: Tensor) -> bool:
    """Whether a hook of this kind on a module of every block misses a call, or its tensor is changed in place later."""
    recorded: list[tuple[Tensor, Tensor]] = []

    def record(tensor: Tensor) -> None:
        recorded.append((tensor, tensor.clone()))

    handles = []
    for block in model.blocks:
        module = block.get_submodule(name)
        if kind == "pre-hook":
            handles.append(module.register_forward_pre_hook(lambda m, inputs: record(inputs[0])))
        elif kind == "hook":
            handles.append(module.register_forward_hook(lambda m, inputs, output: record(output)))
        else:
            forward = module.forward
            module.forward = lambda *a, f=forward: (y := f(*a), record(y))[0]  # as in libraries that wrap modules
    with torch.inference_mode():
        run(images)
    for handle in handles:
        handle.remove()
    for block in model.blocks if kind == "wrapper" else ():
        del block.get_submodule(name).__dict__["forward"]
    return len(recorded) != len(model.blocks) or any(not torch.equal(now, then) for now, then in recorded)


@pytest.mark.parametrize("kind", ["hook", "pre-hook", "wrapper"])
@pytest.mark.parametrize("merging", [False, True], ids=["plain", "token merging"])
def test_hooks_on_inner_modules_are_called(kind: str, merging: bool) -> None:
    model = optimize_for_cpu(make_vit())
    run = TokenMergingViT(model, (1, 1, 1)) if merging else model
    names = [n for n in HOOKED if not (merging and n == "attention")]  # token merging replaces the attention branch
    assert [n for n in names if hook_is_bypassed(kind, n, model, run, random_images(model))] == []


def test_hook_on_a_nested_layer_gets_its_output() -> None:
    """An in-place GELU would change it."""
    mlp = optimize_for_cpu(make_vit()).blocks[0].mlp
    inner = mlp.fc1
    mlp.fc1 = nn.Sequential(inner)
    outputs = []
    inner.register_forward_hook(lambda m, inputs, output: outputs.append(output))
    x = torch.randn(2, 3, 48)
    with torch.no_grad():
        mlp(x)
        assert torch.equal(outputs[0], nn.functional.linear(x, inner.weight, inner.bias))


def test_global_hook_is_called_for_every_module() -> None:
    model, names = optimize_for_cpu(make_vit()), []
    handle = nn.modules.module.register_module_forward_hook(lambda m, i, o: names.append(type(m).__name__))
    try:
        with torch.no_grad():
            model(random_images(model))
    finally:
        handle.remove()
    assert names.count("Linear") == 1 + 4 * 3 + 1


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_mlp_does_not_change_its_input(activation: str) -> None:
    plain, fast = make_pair(activation=activation)
    x = torch.randn(2, 3, 48)
    before = x.clone()
    with torch.no_grad():
        assert torch.equal(fast.blocks[0].mlp(x), plain.blocks[0].mlp(x))
        assert torch.equal(x, before)


# Combination with replaced layers


def test_lora_and_optimization_in_either_order() -> None:
    plain, fast = make_pair()
    first, second = copy.deepcopy(fast), copy.deepcopy(plain)
    for model in (plain, first, second):
        torch.manual_seed(0)
        add_lora(model, 2)
    optimize_for_cpu(second)
    for name, parameter in itertools.chain(*(m.named_parameters() for m in (plain, first, second))):
        if name.endswith(".up"):
            nn.init.ones_(parameter)
    images = random_images(plain)
    with torch.no_grad():
        expected = plain(images)
        assert torch.equal(first(images), expected)
        assert torch.equal(second(images), expected)
        assert (fast(images) - expected).abs().max() > 0.01


def test_int8_and_optimization() -> None:
    plain, fast = make_pair()
    images = random_images(plain)
    with torch.no_grad():
        torch.testing.assert_close(
            quantize_linear_layers(fast)(images), quantize_linear_layers(plain)(images), rtol=1e-5, atol=1e-5
        )


def test_classifier_and_engines_optimize_their_models() -> None:
    """The classifier of evaluation and server, and the model that all other engines export."""
    model = make_vit()
    checkpoint = Checkpoint(model.config, dict(model.state_dict()), Preprocess((32, 32), mean=HALF, std=HALF))
    assert is_optimized(Classifier(checkpoint).model)
    assert is_optimized(ExportableModel(checkpoint))


def test_training_optimizes_its_models(tmp_path: Path) -> None:
    """The model, its EMA, the replicas that share its weights, and the teacher."""
    model = make_vit(num_classes=4, image_size=(16, 16), in_channels=1)
    labels = tuple(f"stripe {i}" for i in range(4))
    preprocess = Preprocess((16, 16), mean=HALF[:1], std=HALF[:1])
    write_checkpoint(tmp_path / "teacher", Checkpoint(model.config, dict(model.state_dict()), preprocess, labels))
    run = trainer(ema=0.9, distill=DistillConfig(teacher=str(tmp_path / "teacher")))
    try:
        assert run.ema is not None
        assert run.teacher is not None
        models = [run.model, run.ema.model, run.teacher.model, *(run.cpu_parallel.replicas if run.cpu_parallel else ())]
        assert all(map(is_optimized, models))
    finally:
        run.close()


def is_optimized(model: nn.Module) -> bool:
    kinds = {type(m) for m in model.modules()}
    return {CPUAttention, CPUMLP} <= kinds and not {Attention, MLP} & kinds
