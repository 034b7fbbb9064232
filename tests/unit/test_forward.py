"""One pack against each sequence alone: log-probs, entropies, hidden states and the gradients of every parameter.

The sequence alone goes through the unpatched model with its native attention and the inputs that a processor gives.
Parameters are float64; Qwen's norms and rotary angles are float32 inside, hence 1e-6 and not 1e-12. TRL's fused head
returns float32 and sums in float32: 1e-5.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

from tests import tiny
from trl_gad import attention, forward
from trl_gad.batch import Pack, Picture, Row, Segment
from trl_gad.packing import unshared
from trl_gad.planner import plan


IMAGE = tiny.TOKEN_ID["<|image_pad|>"]
VIDEO = tiny.TOKEN_ID["<|video_pad|>"]
VISION_START, VISION_END = tiny.TOKEN_ID["<|vision_start|>"], tiny.TOKEN_ID["<|vision_end|>"]
GRIDS = [(1, 4, 6), (1, 2, 2), (1, 8, 4)]  # patches: 6, 1 and 8 tokens
PATCH_SIZE = 3 * 2 * 8 * 8
TEMPERATURE = 0.8


def qwen2_vl() -> torch.nn.Module:
    text = {k: v for k, v in tiny.TEXT.items() if k != "head_dim"}
    text |= dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1]))
    vision = dict(depth=2, embed_dim=32, hidden_size=32, num_heads=2, mlp_ratio=2, patch_size=8)
    torch.manual_seed(0)
    config = Qwen2VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **tiny.VISION_TOKENS)
    return tiny._finish(Qwen2VLForConditionalGeneration(config), 4.0)


MODELS: dict[str, Callable] = dict(
    qwen3_vl=tiny.qwen3_vl, qwen2_5_vl=tiny.qwen2_5_vl, qwen2_vl=qwen2_vl, qwen3=tiny.qwen3_text
)


def build(name: str, heads: bool = True) -> torch.nn.Module:
    model = MODELS[name]().double()
    if heads:
        forward.add_heads(model, TEMPERATURE)
    attention.use_packed_attention(model)
    return model


def picture(grid: tuple[int, int, int], draw: random.Random) -> Picture:
    generator = torch.Generator().manual_seed(draw.randrange(10**6))
    return Picture(torch.randn(grid[0] * grid[1] * grid[2], PATCH_SIZE, generator=generator), grid)


def row(num_pictures: int, lengths: list[int], draw: random.Random) -> Row:
    def text(length: int) -> list[int]:
        return [draw.randrange(256) for _ in range(length)]

    prompt, pictures = text(3), []
    for grid in GRIDS[:num_pictures]:
        pictures.append(picture(grid, draw))
        prompt += [VISION_START, *[IMAGE] * (grid[1] * grid[2] // 4), VISION_END, *text(draw.randrange(3))]
    return Row(prompt + text(2), [text(length) for length in lengths], pictures)


def rows_of(*counts: tuple[int, list[int]]) -> list[Row]:
    draw = random.Random(0)
    return [row(num_pictures, lengths, draw) for num_pictures, lengths in counts]


MIXED = [(1, [4, 1, 2]), (0, [3, 3]), (3, [1, 5])]
CASES = {
    "text": [(0, [3, 1]), (0, [2])],
    "one image": [(1, [4, 1, 2])],
    "three images": [(3, [2, 3])],
    "mixed": MIXED,
    "eight responses": [(1, [1, 6, 2, 3, 1, 4, 5, 2])],
}


def alone_inputs(single: Row) -> dict:
    """What a processor gives for [prompt | response]."""
    ids = torch.tensor([single.prompt_ids + single.responses[0]])
    inputs = dict(input_ids=ids)
    if single.pictures:
        inputs["mm_token_type_ids"] = (ids == IMAGE).int()
        inputs["pixel_values"] = torch.cat([p.pixel_values for p in single.pictures])
        inputs["image_grid_thw"] = torch.tensor([p.grid_thw for p in single.pictures])
    return inputs


@dataclass
class Outcome:
    logps: list[torch.Tensor]  # of each response, [tokens]
    entropies: list[torch.Tensor]
    grads: dict[str, torch.Tensor]


def weights_for(lengths: list[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(length, generator=generator, dtype=torch.float64) for length in lengths]


def finish(model: torch.nn.Module, logps: list[torch.Tensor], entropies: list[torch.Tensor]) -> Outcome:
    """Gradients of a random linear functional of the log-probs."""
    model.zero_grad(set_to_none=True)
    loss = sum((w * logp).sum() for w, logp in zip(weights_for([len(t) for t in logps]), logps, strict=True))
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Outcome([t.detach() for t in logps], [t.detach() for t in entropies], grads)


def scores(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    table = torch.log_softmax(logits, -1)
    return table.gather(-1, targets[:, None])[:, 0], -(table.exp() * table).sum(-1)


def alone(model: torch.nn.Module, rows: list[Row], temperature: float = TEMPERATURE) -> Outcome:
    logps, entropies = [], []
    with attention.native_attention(model):
        for single in unshared(rows):
            response = torch.tensor(single.responses[0])
            logits = model(**alone_inputs(single)).logits[0, -len(response) - 1 : -1]
            logp, entropy = scores(logits / temperature, response)
            logps.append(logp)
            entropies.append(entropy)
    return finish(model, logps, entropies)


def with_logits(model: torch.nn.Module, pack: Pack) -> Outcome:
    """The pack through the model's own head, in float64."""
    logits = model(**forward.model_inputs(pack, "cpu")).logits[0]
    logp, entropy = scores(logits[:-1] / TEMPERATURE, pack.labels[1:].clamp(min=0))
    columns = [forward.per_response(values, pack)[0] for values in (logp, entropy)]
    return finish(model, *[[t[:n] for t, n in zip(c, pack.lengths.tolist(), strict=True)] for c in columns])


def with_head(model: torch.nn.Module, pack: Pack, **options: bool) -> Outcome:
    logps, entropies, mask = forward.log_probs(model, pack, **options)
    assert entropies is not None
    assert mask.sum(1).tolist() == pack.lengths.tolist()
    assert not logps[~mask].any()
    assert not entropies[~mask].any()
    return finish(model, *[[t[m] for t, m in zip(column, mask, strict=True)] for column in (logps, entropies)])


def assert_equal(got: Outcome, expected: Outcome, tolerance: float) -> None:
    for ours, theirs in ((got.logps, expected.logps), (got.entropies, expected.entropies)):
        assert [len(t) for t in ours] == [len(t) for t in theirs]
        torch.testing.assert_close(
            torch.cat(ours).double(), torch.cat(theirs).double(), rtol=tolerance, atol=tolerance
        )
    assert got.grads.keys() == expected.grads.keys()
    assert any(bool(grad.any()) for grad in expected.grads.values())
    # Relative to the largest gradient of all: a bias of the keys, say, has a gradient of exactly zero in theory.
    scale = max(float(grad.abs().max()) for grad in expected.grads.values())
    for name, grad in got.grads.items():
        difference = float((grad - expected.grads[name]).abs().max())
        size = max(float(expected.grads[name].abs().max()), 1e-3 * scale)
        assert difference <= tolerance * size, f"{name}: {difference:.3g} of {size:.3g}"


@pytest.fixture(scope="module")
def models() -> Callable[[str], torch.nn.Module]:
    built: dict[str, torch.nn.Module] = {}

    def get(name: str) -> torch.nn.Module:
        if name not in built:
            built[name] = build(name)
        return built[name]

    return get


ALL = [(name, case) for name in MODELS for case in CASES if name != "qwen3" or case == "text"]


@pytest.mark.parametrize(("name", "case"), ALL)
@pytest.mark.parametrize("share", [True, False], ids=["shared", "unshared"])
def test_a_pack_equals_each_sequence_alone(models: Callable, name: str, case: str, share: bool) -> None:
    model, rows = models(name), rows_of(*CASES[case])
    pack = forward.make_pack(model.config, rows if share else unshared(rows))
    expected = alone(model, rows)
    assert_equal(with_logits(model, pack), expected, 1e-6)
    assert_equal(with_head(model, pack), expected, 1e-5)


def test_the_head_at_temperature_one_and_generate_live_beside_the_other(models: Callable) -> None:
    model, rows = models("qwen3_vl"), rows_of(*MIXED)
    pack = forward.make_pack(model.config, rows)
    assert_equal(with_head(model, pack, at_temperature_one=True), alone(model, rows, temperature=1.0), 1e-5)
    logps, entropies, _ = forward.log_probs(model, pack, compute_entropy=False)
    assert entropies is None
    assert torch.equal(logps, forward.log_probs(model, pack)[0])

    bare = tiny.qwen3_vl().double()
    inputs = alone_inputs(rows[0])
    options = dict(max_new_tokens=5, do_sample=False)
    with attention.native_attention(model):
        assert torch.equal(model.generate(**inputs, **options), bare.generate(**inputs, **options))


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_vl"])
def test_gradient_checkpointing_and_lora_change_nothing(name: str) -> None:
    rows = rows_of(*MIXED)
    model = MODELS[name]().double()
    forward.add_heads(model, TEMPERATURE)
    torch.manual_seed(0)
    peft_model = get_peft_model(
        model, LoraConfig(r=2, target_modules=["q_proj", "v_proj", "qkv"], init_lora_weights=False)
    ).double()
    attention.use_packed_attention(peft_model)
    pack = forward.make_pack(model.config, rows)
    expected = alone(peft_model, rows)
    assert all("lora" in parameter for parameter in expected.grads)
    assert_equal(with_logits(peft_model, pack), expected, 1e-6)
    peft_model.train()
    peft_model.gradient_checkpointing_enable()
    peft_model.enable_input_require_grads()
    assert_equal(with_logits(peft_model, pack), expected, 1e-6)
    assert_equal(with_head(peft_model, pack), expected, 1e-5)


def test_gradient_checkpointing_of_all_parameters() -> None:
    model, rows = build("qwen3_vl"), rows_of(*MIXED)
    pack = forward.make_pack(model.config, rows)
    expected = with_logits(model, pack)
    model.train()
    model.gradient_checkpointing_enable()
    assert_equal(with_logits(model, pack), expected, 1e-9)


@pytest.mark.parametrize("budget", [36, 45, 1000])
def test_any_cut_gives_the_same_summed_gradients(models: Callable, budget: int) -> None:
    model, rows = models("qwen3_vl"), rows_of(*MIXED)
    micro_batches = plan([(len(r.prompt_ids), [len(ids) for ids in r.responses]) for r in rows], budget)
    assert (len(micro_batches) == 1) == (budget == 1000)
    expected = alone(model, rows)
    order = [(g, i) for g, r in enumerate(rows) for i in range(len(r.responses))]
    weights = dict(zip(order, weights_for([len(rows[g].responses[i]) for g, i in order]), strict=True))
    model.zero_grad(set_to_none=True)
    for micro_batch in micro_batches:
        cut = [replace(rows[g], responses=[rows[g].responses[i] for i in own]) for g, own in micro_batch]
        logps, _, mask = forward.log_probs(model, forward.make_pack(model.config, cut))
        chosen = torch.cat([weights[g, i] for g, own in micro_batch for i in own])
        (chosen * logps[mask]).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert_equal(replace(expected, grads=grads), expected, 1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_hidden_states_at_last_equal_each_sequence_alone(name: str) -> None:
    backbone = MODELS[name]().double().base_model
    rows = rows_of(*(CASES["text"] if name == "qwen3" else MIXED))
    expected = torch.stack([backbone(**alone_inputs(single)).last_hidden_state[0, -1] for single in unshared(rows)])
    attention.use_packed_attention(backbone)
    pack = forward.make_pack(backbone.config, rows)
    states = forward.hidden_states(backbone, pack, "cpu")
    assert states.shape == (len(pack.input_ids), 32)
    torch.testing.assert_close(states[pack.last], expected, rtol=1e-6, atol=1e-6)


def test_the_vision_tower_reads_each_picture_once_per_row(models: Callable) -> None:
    model, rows = models("qwen3_vl"), rows_of(*MIXED)
    patches: list[int] = []
    hook = model.model.visual.register_forward_pre_hook(lambda _, arguments: patches.append(len(arguments[0])))
    forward.log_probs(model, forward.make_pack(model.config, rows))
    hook.remove()
    # One picture of 24 patches, then 24 + 4 + 32, whatever the number of responses.
    assert patches == [24 + 24 + 4 + 32]


@pytest.mark.parametrize("name", [name for name in MODELS if name != "qwen3"])
@pytest.mark.parametrize("num_pictures", [0, 1, 3])
def test_positions_equal_the_models_own(models: Callable, name: str, num_pictures: int) -> None:
    model = models(name)
    inputs = alone_inputs(rows_of((num_pictures, [4]))[0])
    ids = inputs["input_ids"]
    grid = inputs.get("image_grid_thw")
    expected, _ = model.model.get_rope_index(ids, mm_token_type_ids=(ids == IMAGE).int(), image_grid_thw=grid)
    grids = [tuple(g) for g in grid.tolist()] if num_pictures else []
    assert torch.equal(forward.prompt_positions(model.config, ids[0].tolist(), grids), expected[:, 0])
    # Prompt, then response: the pack of one row is the sequence, with the prompt's last token in its place.
    single = rows_of((num_pictures, [4]))[0]
    assert torch.equal(forward.make_pack(model.config, [single]).positions, expected[:, 0])


def oracle_mask(segments: list[Segment]) -> torch.Tensor:
    """Who sees whom, one pair at a time, from the rule alone."""
    owner = {}  # place -> (row, response or None)
    for number, segment in enumerate(segments):
        owner |= dict.fromkeys(range(*segment.prompt), (number, None))
        for index, response in enumerate(segment.responses):
            owner |= dict.fromkeys(range(*response), (number, index))
    mask = torch.zeros(len(owner), len(owner), dtype=torch.bool)
    for query, (its_row, its_response) in owner.items():
        for key, (row_of_key, response_of_key) in owner.items():
            mask[query, key] = key <= query and row_of_key == its_row and response_of_key in (None, its_response)
    return mask


SEGMENTS = [
    Segment((0, 3), [(3, 5), (5, 9), (9, 11)]),
    Segment((11, 11), [(11, 13), (13, 16)]),  # a prompt of one token
    Segment((16, 20), [(20, 23)]),
]


def test_the_layout_says_who_sees_whom() -> None:
    layout = attention.layout(SEGMENTS, "cpu")
    expected = oracle_mask(SEGMENTS)
    dense = torch.zeros_like(expected)
    for (start, stop), mask in zip(layout.rows, layout.masks, strict=True):
        causal = torch.ones(stop - start, stop - start, dtype=torch.bool).tril()
        dense[start:stop, start:stop] = causal if mask is None else mask
    assert torch.equal(dense, expected)

    gathered = torch.zeros_like(expected)
    cu_q, cu_k = layout.cu_q.tolist(), layout.cu_k.tolist()
    assert (cu_q[-1], cu_k[-1]) == (23, len(layout.keys))
    for q, q_end, k, k_end in zip(cu_q, cu_q[1:], cu_k, cu_k[1:], strict=False):
        assert q < q_end, "no sequence without a query"
        for i in range(q_end - q):  # aligned at the end: the last query sees all keys
            gathered[q + i, layout.keys[k : k_end - (q_end - q) + i + 1]] = True
    assert torch.equal(gathered, expected)
    assert (layout.max_q, layout.max_k) == (4, 7)


def reference_kernel(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa=False):
    """What `varlen_attn` computes, which has no CPU kernel: causal, aligned at the end of the keys."""
    assert window_size == (-1, 0)
    repeats = q.shape[1] // k.shape[1] if enable_gqa else 1
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    outputs = []
    for i in range(len(cu_q) - 1):
        queries, keys, values = q[cu_q[i] : cu_q[i + 1]], k[cu_k[i] : cu_k[i + 1]], v[cu_k[i] : cu_k[i + 1]]
        assert len(queries) <= max_q
        assert len(keys) <= max_k
        seen = torch.ones(len(queries), len(keys), dtype=torch.bool).tril(len(keys) - len(queries))
        logits = torch.einsum("qhd,khd->hqk", queries, keys) * scale
        outputs.append(torch.einsum("hqk,khd->qhd", logits.masked_fill(~seen, float("-inf")).softmax(-1), values))
    return torch.cat(outputs)


@pytest.mark.parametrize("options", [{"enable_gqa": True}, {}], ids=["torch 2.12", "torch 2.11"])
def test_what_the_kernel_is_given_equals_dense_attention(options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "varlen_attn", reference_kernel)
    monkeypatch.setattr(attention, "_VARLEN_OPTIONS", options)
    torch.manual_seed(0)
    layout = attention.layout(SEGMENTS, "cpu")
    states = [torch.randn(1, heads, 23, 8, dtype=torch.float64) for heads in (4, 2, 2)]
    weight = torch.randn(1, 23, 4, 8, dtype=torch.float64)
    results = []
    for attend in (attention.varlen, attention.dense):
        leaves = [state.clone().requires_grad_() for state in states]
        output = attend(*leaves, layout, 0.3)
        output.backward(weight)
        results.append([output.detach(), *[leaf.grad for leaf in leaves]])
    # Gradients of keys and values are summed in float32.
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_the_text_layers_alone_change_their_attention() -> None:
    model = tiny.qwen3_vl()
    model.set_attn_implementation({"text_config": "eager", "vision_config": "sdpa"})
    attention.use_packed_attention(model)
    config = model.config
    assert (config.text_config._attn_implementation, config.vision_config._attn_implementation) == ("trl_gad", "sdpa")
    with attention.native_attention(model):
        assert config.text_config._attn_implementation == "eager"
    assert config.text_config._attn_implementation == "trl_gad"
    assert config.vision_config._attn_implementation == "sdpa"
    with pytest.raises(RuntimeError, match="native_attention"):
        model(input_ids=torch.tensor([[1, 2]]))
    with pytest.raises(ValueError, match="without `attention_mask`"):
        model(input_ids=torch.tensor([[1, 2]]), attention_mask=torch.tensor([[0, 1]]))


def test_models_that_cannot_be_packed_are_refused() -> None:
    windowed = tiny.qwen3_text()
    windowed.config.layer_types = ["full_attention", "sliding_attention", "full_attention"]
    with pytest.raises(ValueError, match=r"has sliding_attention in `layer_types`.*Use a model"):
        attention.use_packed_attention(windowed)
    assert windowed.config._attn_implementation == "sdpa"

    dropping = tiny.qwen3_text().train()
    dropping.model.layers[0].self_attn.attention_dropout = 0.1
    attention.use_packed_attention(dropping)
    pack = forward.make_pack(dropping.config, rows_of((0, [2])))
    with pytest.raises(ValueError, match=r"dropout 0\.1.*Set `attention_dropout` to 0"):
        dropping(**forward.model_inputs(pack, "cpu"))

    other = tiny.qwen3_vl().config
    other.model_type = "qwen9_vl"
    with pytest.raises(ValueError, match="'qwen9_vl'"):
        forward.is_vision_model(other)


def test_prompts_and_pictures_that_do_not_match_are_refused() -> None:
    config, text = tiny.qwen3_vl().config, tiny.qwen3_text().config
    draw = random.Random(0)
    small = picture((1, 2, 2), draw)
    seen = [VISION_START, IMAGE, VISION_END, 5]
    for bad, match in {
        "no pictures": (Row(seen, [[7]]), "the prompt has 1 and the row 0"),
        "no placeholder": (Row([4, 5], [[7]], [small]), "the prompt has 0 and the row 1"),
        "another size": (Row(seen, [[7]], [picture((1, 4, 2), draw)]), "picture 1 of the prompt has 1"),
        "ends in a picture": (Row([VISION_START, IMAGE], [[7]], [small]), "must not end in a visual token"),
        "a sampled placeholder": (Row([4, 5], [[7], [5, IMAGE, 7]]), "response 1 does"),
        "a video": (Row([VIDEO, 5], [[7]]), "Video is not supported"),
        "no prompt": (Row([], [[7]]), "empty prompt"),
    }.values():
        with pytest.raises(ValueError, match=match):
            forward.make_pack(config, [bad])
    with pytest.raises(ValueError, match="reads text only"):
        forward.make_pack(text, [Row([4, 5], [[7]], [small])])


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_varlen_equals_dense_attention(dtype: torch.dtype, key_heads: int) -> None:
    """Responses have fewer queries than keys: a kernel that aligned them at the start would differ at once."""
    assert attention._use_varlen(torch.device("cuda", 0), dtype, 64)
    draw = random.Random(0)
    segments, place = [], 0
    for num_prompt, lengths in [(150, [3, 200, 1, 40]), (0, [2, 129]), (7, [64])]:
        segments.append(Segment((place, place + num_prompt), []))
        place += num_prompt
        for length in lengths:
            segments[-1].responses.append((place, place + length))
            place += length
    torch.manual_seed(draw.randrange(100))
    layout = attention.layout(segments, "cuda")
    states = [torch.randn(1, heads, place, 64, device="cuda", dtype=dtype) for heads in (4, key_heads, key_heads)]
    weight = torch.randn(1, place, 4, 64, device="cuda", dtype=dtype)
    results = []
    for attend, kind in ((attention.varlen, dtype), (attention.dense, dtype), (attention.dense, torch.float32)):
        leaves = [state.detach().to(kind).requires_grad_() for state in states]
        output = attend(*leaves, layout, 0.125)
        output.backward(weight.to(kind))
        results.append([output.detach().float(), *[leaf.grad.float() for leaf in leaves]])
    for ours, dense, exact in zip(*results, strict=True):
        # As close to float32 as the dense kernel of the same dtype, within a factor.
        assert (ours - exact).norm() <= 2 * (dense - exact).norm() + 1e-6 * exact.norm()
        assert (ours - exact).norm() <= 1e-2 * exact.norm()


@pytest.mark.gpu
@needs_cuda
def test_a_pack_in_bfloat16_on_the_device_equals_each_sequence_alone() -> None:
    torch.manual_seed(0)
    config = tiny.qwen3_vl().config
    config.text_config.head_dim = 64
    config.text_config.rope_parameters["mrope_section"] = [12, 10, 10]
    model = tiny._finish(type(tiny.qwen3_vl())(config), 2.0).cuda()
    forward.add_heads(model, TEMPERATURE)
    attention.use_packed_attention(model)
    rows = rows_of(*MIXED)
    logps = {}
    for share in (True, False):
        pack = forward.make_pack(model.config, rows if share else unshared(rows))
        with torch.autocast("cuda", torch.bfloat16):
            logps[share] = forward.log_probs(model, pack)[0].detach()
    exact, _, mask = forward.log_probs(model, forward.make_pack(model.config, rows))
    assert (logps[True] - logps[False]).abs().max() <= 0.05
    for ours in logps.values():
        assert (ours - exact)[mask].abs().mean() <= 0.05


def test_attention_computes_in_the_autocast_dtype():
    """Float32 weights under autocast leave queries and keys in float32: the fast kernel would never be chosen."""
    seen = []
    config = tiny.qwen3_vl()
    attention.use_packed_attention(config)
    original = attention.dense

    def spy(query, key, value, layout, scale):
        seen.append({query.dtype, key.dtype, value.dtype})
        return original(query, key, value, layout, scale)

    pack = forward.make_pack(config.config, [Row([1, 2, 3], [[4, 5], [6]])])
    attention.dense = spy
    try:
        with torch.autocast("cpu", torch.bfloat16):
            config.model(**forward.model_inputs(pack, "cpu"))
    finally:
        attention.dense = original
    assert seen
    assert all(dtypes == {torch.bfloat16} for dtypes in seen)
