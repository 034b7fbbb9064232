"""The fused kernels and the dtype of the residual stream."""

import copy
import types
from typing import Any

import pytest
import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

from tests import tiny
from trl_gad import kernels


def hidden_dtypes(model: Any) -> set[torch.dtype]:
    """Dtypes that the decoder layers are given, with pictures and without."""
    seen = set()
    for layer in model.model.language_model.layers:
        layer.register_forward_pre_hook(lambda module, args: seen.add(args[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        model.model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False)
    return seen


def test_the_residual_stream_follows_autocast() -> None:
    model = tiny.qwen3_vl()
    assert hidden_dtypes(copy.deepcopy(model)) == {torch.float32}  # what transformers does by itself
    kernels.follow_autocast(model)
    seen = hidden_dtypes(model)
    assert torch.bfloat16 in seen
    # A norm whose weight is float32 gives float32, but the residual it is added to stays
    assert seen == {torch.bfloat16}


def test_without_autocast_nothing_changes() -> None:
    model = tiny.qwen3_text()
    ids = torch.tensor([[1, 2, 3]])
    before = model(ids).logits
    kernels.follow_autocast(model)
    assert torch.equal(model(ids).logits, before)


def test_without_a_gpu_no_module_changes() -> None:
    model = tiny.qwen3_text()
    assert kernels.use_fused_kernels(model) == 0
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("build", [tiny.qwen3_text, tiny.qwen3_vl, tiny.qwen2_5_vl])
def test_what_is_fused_is_still_called_so_in_transformers(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were one of these renamed, its fused kernel would be lost in silence, and found missing on a GPU alone."""
    monkeypatch.setattr(kernels, "_is_same", lambda *args: True)
    monkeypatch.setattr(kernels, "_is_same_rotation", lambda *args: True)
    found = {type(m).__name__ for m in build().modules() if kernels._fused_forward(m, torch.device("cpu")) is not None}
    kinds = {
        tiny.qwen3_text: {"Qwen3RMSNorm", "Qwen3MLP", "Qwen3Attention"},
        tiny.qwen3_vl: {"Qwen3VLTextRMSNorm", "Qwen3VLTextMLP", "Qwen3VLTextAttention", "Qwen3VLVisionAttention"},
        tiny.qwen2_5_vl: {
            "Qwen2_5_VLRMSNorm", "Qwen2MLP", "Qwen2_5_VLAttention", "Qwen2_5_VLVisionAttention", "Qwen2_5_VLMLP",
        },
    }  # fmt: skip
    assert found == kinds[build]


def test_an_attention_calls_the_other_rotation_and_nothing_else_changes() -> None:
    model = tiny.qwen3_text()
    ids = torch.tensor([[1, 2, 3]])
    expected = model(ids, use_cache=False).logits
    calls = []

    def counted(plain: Any, *args: Any) -> Any:
        calls.append(len(args))
        return plain(*args)

    for layer in model.model.layers:
        code = type(layer.self_attn).forward
        forward = kernels._calling(code, "apply_rotary_pos_emb", counted, code.__globals__["apply_rotary_pos_emb"])
        layer.self_attn.forward = types.MethodType(forward, layer.self_attn)
    assert torch.equal(model(ids, use_cache=False).logits, expected)
    assert calls == [4] * 3  # queries, keys, cosines, sines


needs_liger = pytest.mark.skipif(
    not (torch.cuda.is_available() and kernels.is_liger_available()), reason="needs a CUDA device and liger-kernel"
)


@pytest.mark.gpu
@needs_liger
@pytest.mark.parametrize("name", ["qwen3", "qwen3_vl", "qwen2_5_vl"])
def test_fused_modules_give_the_same_numbers_and_gradients(name: str) -> None:
    torch.manual_seed(0)
    model = {"qwen3": tiny.qwen3_text, "qwen3_vl": tiny.qwen3_vl, "qwen2_5_vl": tiny.qwen2_5_vl}[name]().cuda()
    fused = copy.deepcopy(model)
    assert kernels.use_fused_kernels(fused) >= 13  # three layers: two norms, attention and MLP each; the last norm
    ids = torch.randint(0, 250, (1, 2 * kernels.MIN_TOKENS), device="cuda")
    side = 2 * int(kernels.MIN_TOKENS**0.5 / 2) + 2  # patches of a picture that is long enough
    pixels, grid = torch.randn(side**2, 3 * 2 * 8 * 8, device="cuda"), torch.tensor([[1, side, side]], device="cuda")
    results = []
    for each in (model, fused):
        loss = each(ids, use_cache=False).logits.float().log_softmax(-1)[0, :, 7].mean()
        if name != "qwen3":
            loss = loss + each.model.visual(pixels, grid_thw=grid).pooler_output.square().mean()
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in each.parameters() if p.grad is not None)])
    assert len(results[0]) == len(results[1]) > (20 if name == "qwen3" else 50)
    for plain, ours in zip(*results, strict=True):
        assert (plain - ours).norm() <= 1e-3 * plain.norm() + 1e-7


@pytest.mark.gpu
@needs_liger
def test_a_norm_that_adds_one_to_its_weight_keeps_its_forward() -> None:
    norm = GemmaRMSNorm(64).cuda()
    norm.variance_epsilon = norm.eps
    assert not kernels._is_same(norm, kernels._rms_norm, 64, torch.device("cuda"))


@pytest.mark.gpu
@needs_liger
def test_a_copy_of_a_fused_model_runs_its_own_weights() -> None:
    model = tiny.qwen3_text().cuda()
    kernels.use_fused_kernels(model)
    other = copy.deepcopy(model)
    for p in other.parameters():
        p.data.mul_(0.5)
    ids = torch.randint(0, 250, (1, 2 * kernels.MIN_TOKENS), device="cuda")
    before = model(ids, use_cache=False).logits
    assert not torch.equal(other(ids, use_cache=False).logits, before)
    assert torch.equal(model(ids, use_cache=False).logits, before)
