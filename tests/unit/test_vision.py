"""The patch embedding as a matrix product, and one frozen vision tower that reads every picture once for all models."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import PreTrainedModel, Qwen2VLConfig, Qwen2VLForConditionalGeneration, TrainerCallback

from tests import runs, tiny
from trl_gad import Discriminator, GADTrainer
from trl_gad.attention import NAME, native_attention, use_packed_attention
from trl_gad.batch import Group, Pack, Picture, Row
from trl_gad.forward import hidden_states, make_pack, vision_tower
from trl_gad.models import own_parameters, structural_copy
from trl_gad.packing import unshared
from trl_gad.vision import FeatureCache, PatchConv3d, share_vision_tower, use_matrix_patches


IMAGE = tiny.TOKEN_ID["<|image_pad|>"]
START = tiny.TOKEN_ID["<|vision_start|>"]
TARGETS = r".*language_model\.layers\.\d+\.self_attn\.(q_proj|v_proj)"
# Of `runs.rows()`, each once: row i has i % 3 pictures of 32 x 32 pixels (i even) or 48 x 32 (i odd), which are 4 x 4
# or 6 x 4 patches. Rows 1, 2, 4, 5: 24 + 2 * 16 + 16 + 2 * 24 = 120; rows 7, 8, 10, 11 the same.
PATCHES_OF_ALL_ROWS = 240


def qwen2_vl() -> PreTrainedModel:
    text = {name: value for name, value in tiny.TEXT.items() if name != "head_dim"} | dict(
        rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1])
    )
    vision: dict[str, Any] = dict(depth=2, embed_dim=32, hidden_size=32, mlp_ratio=2, num_heads=2, patch_size=8)
    torch.manual_seed(0)
    tokens: dict[str, Any] = tiny.VISION_TOKENS
    config = Qwen2VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **tokens)
    return Qwen2VLForConditionalGeneration(config).eval()


MODELS = dict(qwen3_vl=tiny.qwen3_vl, qwen2_5_vl=tiny.qwen2_5_vl, qwen2_vl=qwen2_vl)


def lora(**fields: Any) -> LoraConfig:
    defaults: dict[str, Any] = dict(r=2, target_modules=TARGETS)
    return LoraConfig(**(defaults | fields))


def picture(seed: int, height: int = 4, width: int = 4) -> Picture:
    torch.manual_seed(seed)
    return Picture(torch.randn(height * width, 3 * 2 * 8 * 8), (1, height, width))


def group(*pictures: Picture) -> Group:
    ids = [40, 41]
    for one in pictures:
        ids += [START, *[IMAGE] * (one.grid_thw[1] * one.grid_thw[2] // 4)]
    return Group(0, [*ids, 42], [50, 51], list(pictures))


# ---- The patch embedding ----


@pytest.mark.parametrize("name", MODELS)
def test_the_matrix_product_is_the_convolution(name: str):
    model = MODELS[name]().double()
    plain = copy.deepcopy(model)
    assert use_matrix_patches(model) == 1
    assert use_matrix_patches(model) == 0  # done
    assert {n: v.shape for n, v in model.state_dict().items()} == {n: v.shape for n, v in plain.state_dict().items()}
    pixels = picture(1, 4, 8).pixel_values.double()
    results = []
    for tower in (vision_tower(model), vision_tower(plain)):
        seen = pixels.clone().requires_grad_(True)
        output = tower(seen, grid_thw=torch.tensor([[1, 4, 8]])).pooler_output
        output.square().mean().backward()
        gradients = {n: p.grad for n, p in tower.named_parameters() if p.grad is not None}
        results.append((output, seen.grad, gradients))
    (output, of_pixels, found), (expected, expected_of_pixels, of_tower) = results
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(of_pixels, expected_of_pixels, rtol=1e-8, atol=1e-10)
    assert "patch_embed.proj.weight" in of_tower
    assert float(of_tower["patch_embed.proj.weight"].abs().max()) > 1e-6
    torch.testing.assert_close(found, of_tower, rtol=1e-8, atol=1e-10)


def test_dtypes_of_the_matrix_product():
    embed, plain = (tiny.qwen3_vl().model.visual.patch_embed for _ in range(2))
    embed.proj.__class__ = PatchConv3d
    pixels = picture(1).pixel_values
    torch.testing.assert_close(embed(pixels), plain(pixels), rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert embed(pixels).dtype == plain(pixels).dtype == torch.bfloat16
        torch.testing.assert_close(embed(pixels), plain(pixels), rtol=0.02, atol=0.1)
    assert embed.to(torch.bfloat16)(pixels).dtype == torch.bfloat16


def test_patches_that_overlap_stay_a_convolution():
    model: Any = tiny.qwen3_vl()
    old = model.model.visual.patch_embed.proj
    model.model.visual.patch_embed.proj = nn.Conv3d(3, 32, old.kernel_size, stride=(2, 4, 4))
    assert use_matrix_patches(model) == 0
    assert type(model.model.visual.patch_embed.proj) is nn.Conv3d
    # A larger input is several patches, which a convolution gives as a grid
    conv = nn.Conv3d(3, 5, (2, 8, 8), stride=(2, 8, 8))
    frames = torch.randn(1, 3, 4, 16, 24)
    expected = conv(frames)
    conv.__class__ = PatchConv3d
    assert conv(frames).shape == (1, 5, 2, 2, 3)
    assert torch.equal(conv(frames), expected)


def test_adapters_of_the_patch_embedding():
    model = get_peft_model(tiny.qwen3_vl(), lora(target_modules=["patch_embed.proj"], init_lora_weights=False))
    pixels, grid = picture(1).pixel_values, torch.tensor([[1, 4, 4]])
    expected = vision_tower(model)(pixels, grid_thw=grid).pooler_output
    assert use_matrix_patches(model) == 3  # base, A, B
    torch.testing.assert_close(vision_tower(model)(pixels, grid_thw=grid).pooler_output, expected)


def test_a_copy_runs_its_own_weights():
    model = tiny.qwen3_vl().requires_grad_(False)
    use_matrix_patches(model)
    use_packed_attention(model)
    cache = FeatureCache(model)
    assert cache.attach(model)
    pack = make_pack(model.config, [Row([40, START, *[IMAGE] * 4, 42], [[50]], [picture(1)])])
    cache.hold([group(*pack.pictures)])
    before = hidden_states(model.base_model, pack, "cpu")
    copied = structural_copy(model)
    own_parameters(copied)
    with torch.no_grad():
        vision_tower(copied).patch_embed.proj.weight.mul_(2)
        cache.clear()
        assert torch.equal(hidden_states(model.base_model, pack, "cpu"), before)
        vision_tower(copied).feature_cache.clear()
        assert not torch.allclose(hidden_states(copied.base_model, pack, "cpu"), before, atol=1e-3)


@pytest.mark.parametrize("given", [None, "model", "folder"])
def test_all_models_of_a_run_have_it(given: str | None, tmp_path: Path):
    more: dict[str, Any] = {}
    if given is not None:
        more["discriminator"] = tiny.qwen3_vl(seed=1)
    if given == "folder":
        Discriminator.from_policy(more["discriminator"]).save_pretrained(tmp_path / "D")
        more["discriminator"] = str(tmp_path / "D")
    trainer = runs.trainer(tmp_path, freeze_vision=True, **more)
    trainer.take_snapshot()
    towers = [vision_tower(model) for model in models(trainer)]
    assert all(type(tower.patch_embed.proj) is PatchConv3d for tower in towers)
    shared = towers[0].patch_embed.proj.weight
    assert towers[2].patch_embed.proj.weight is shared
    assert (towers[1].patch_embed.proj.weight is shared) == (given is None)
    assert ["forward" in vars(tower) for tower in towers] == [True, given is None, True]


def models(trainer: GADTrainer) -> list[Any]:
    """Policy, discriminator's backbone, reference."""
    return [trainer.policy, trainer.discriminator.backbone, trainer.reference]


# ---- One tower ----


@pytest.mark.parametrize(
    ("policy_lora", "discriminator_lora"),
    [(False, False), (False, True), (True, False), (True, True), ("given", False)],
)
def test_the_frozen_tower_is_held_once(policy_lora: bool | str, discriminator_lora: bool, tmp_path: Path):
    more: dict[str, Any] = {}
    if policy_lora == "given":
        more["model"] = get_peft_model(tiny.qwen3_vl(), lora(init_lora_weights=False))
    elif policy_lora:
        more["peft_config"] = lora()
    if discriminator_lora:
        more["discriminator_peft_config"] = lora(init_lora_weights=False)
    trainer = runs.trainer(tmp_path, freeze_vision=True, **more)
    trainer.take_snapshot()
    policy, discriminator, reference = (dict(vision_tower(model).named_parameters()) for model in models(trainer))
    assert len(policy) > 20
    assert all(discriminator[name] is p and reference[name] is p for name, p in policy.items())
    assert policy.keys() == discriminator.keys() == reference.keys()
    assert not any(parameter.requires_grad for parameter in policy.values())
    trained = [name for name, parameter in trainer.discriminator.named_parameters() if parameter.requires_grad]
    assert any("language_model" in name for name in trained)
    assert all("forward" in vars(vision_tower(model)) for model in models(trainer))


@pytest.mark.parametrize("adapters", [False, True])
def test_the_discriminator_is_saved_whole(adapters: bool, tmp_path: Path):
    tiny.qwen3_vl().save_pretrained(tmp_path / "base")
    more: dict[str, Any] = dict(discriminator_peft_config=lora(init_lora_weights=False)) if adapters else {}
    trainer = runs.trainer(tmp_path, model=str(tmp_path / "base"), freeze_vision=True, **more)
    trainer.discriminator.save_pretrained(tmp_path / "D")
    loaded = Discriminator.from_pretrained(tmp_path / "D")
    ids = torch.tensor([group(picture(1)).prompt_ids])
    inputs = dict(
        input_ids=ids, pixel_values=picture(1).pixel_values, image_grid_thw=torch.tensor([[1, 4, 4]]),
        mm_token_type_ids=(ids == IMAGE).int(), last=torch.tensor([3, ids.size(1) - 1]),
    )  # fmt: skip
    with native_attention(trainer.discriminator.backbone), torch.no_grad():
        expected = trainer.discriminator.eval()(**inputs)
        torch.testing.assert_close(loaded(**inputs), expected, rtol=1e-6, atol=1e-6)
    # Loaded into a model without any of this, by the names that transformers gives
    assert not any(isinstance(module, PatchConv3d) for module in loaded.modules())
    assert {n.replace("backbone.", "", 1) for n in trainer.discriminator.state_dict()} == {
        n.replace("backbone.", "", 1) for n in loaded.state_dict()
    }


def test_weights_of_another_tower_are_refused(tmp_path: Path):
    trainer = runs.trainer(tmp_path, freeze_vision=True)
    state = {name: value.clone() for name, value in trainer.discriminator.state_dict().items()}
    trainer.discriminator.load_state_dict(state)  # the same
    state["backbone.visual.patch_embed.proj.bias"] += 1
    before = vision_tower(trainer.policy).patch_embed.proj.bias.clone()
    with pytest.raises(ValueError, match="patch_embed.proj.bias differs.*`freeze_vision` that the run was started"):
        trainer.discriminator.load_state_dict(state)
    assert torch.equal(vision_tower(trainer.policy).patch_embed.proj.bias, before)


def test_towers_that_are_not_the_same(tmp_path: Path):
    with_adapters = get_peft_model(tiny.qwen3_vl(), lora(target_modules=["qkv"])).requires_grad_(False)
    assert not share_vision_tower(tiny.qwen3_vl().requires_grad_(False), with_adapters)
    assert not share_vision_tower(tiny.qwen3_text(), tiny.qwen3_text())
    assert not FeatureCache(tiny.qwen3_text()).attach(tiny.qwen3_text())
    # Equal weights, other tensors
    frozen = tiny.qwen3_vl().requires_grad_(False)
    assert not FeatureCache(frozen).attach(tiny.qwen3_vl().requires_grad_(False))
    # A tower that trains; adapters in it that do; frozen ones with dropout
    assert not FeatureCache(tiny.qwen3_vl()).attach(tiny.qwen3_vl())
    for model in (
        get_peft_model(tiny.qwen3_vl(), lora(target_modules=["qkv"])),
        get_peft_model(tiny.qwen3_vl(), lora(target_modules=["qkv"], lora_dropout=0.1)).requires_grad_(False),
    ):
        assert not FeatureCache(model).attach(model)
    # Frozen by the adapters' configuration, and the discriminator trains its own
    trainer = runs.trainer(tmp_path, peft_config=lora())
    attached = ["forward" in vars(vision_tower(model)) for model in models(trainer)[:2]]
    assert attached == [True, False]


# ---- Features ----


class Counter:
    """Patches that go through towers, call by call, but for those of `generate`."""

    def __init__(self, *hooked: Any):
        self.calls: list[int] = []
        for model in hooked:
            vision_tower(model).patch_embed.register_forward_hook(self._hook(model))

    def _hook(self, model: Any) -> Any:
        def hook(module: nn.Module, args: tuple[torch.Tensor], output: torch.Tensor) -> None:
            if model.config.get_text_config()._attn_implementation == NAME:
                self.calls.append(len(args[0]))

        return hook


def cached(name: str) -> tuple[PreTrainedModel, FeatureCache, Counter]:
    model = MODELS[name]().requires_grad_(False)
    use_packed_attention(model)
    cache = FeatureCache(model)
    assert cache.attach(model)
    return model, cache, Counter(model)


def pack_of(model: PreTrainedModel, groups: list[Group], share_prompt: bool = True) -> Pack:
    rows = [Row(one.prompt_ids, [[50, 51], [52]], one.pictures) for one in groups]
    return make_pack(model.config, rows if share_prompt else unshared(rows))


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_picture_is_read_once(name: str):
    model, cache, counter = cached(name)
    first, second, other = picture(1), picture(2, 4, 6), picture(3, 2, 8)
    # One picture in two groups, a group without any, two in one group
    groups = [group(first), group(), group(second, first)]
    plain = copy.deepcopy(model)
    del vision_tower(plain).forward

    def check(chosen: list[Group], share_prompt: bool = True) -> list[int]:
        counter.calls.clear()
        pack = pack_of(model, chosen, share_prompt)
        found = hidden_states(model.base_model, pack, "cpu")
        calls = list(counter.calls)
        torch.testing.assert_close(found, hidden_states(plain.base_model, pack, "cpu"), rtol=1e-5, atol=1e-5)
        return calls

    cache.hold(groups)
    assert check(groups[:2]) == [16]
    assert check(groups, share_prompt=False) == [24]  # 3 x 2 pictures, one of them new
    assert check(groups[::-1]) == []
    assert check([groups[1]]) == []
    assert check([group(other)]) == [16]  # of no group that is held: as ever
    assert check([group(other)]) == [16]
    cache.hold(groups[2:])  # the second is in there too
    assert check(groups) == []
    cache.hold([group(other)])
    assert check([groups[0], group(other)]) == [32]  # partly held: as ever
    cache.hold(groups)
    assert sorted(check(groups)) == [40]
    cache.clear()
    assert check(groups) == [56]


def test_features_have_no_gradient_and_keep_their_dtype():
    model, cache, _ = cached("qwen3_vl")
    tower, one = vision_tower(model), picture(1)
    cache.hold([group(one)])
    with torch.autocast("cpu", torch.bfloat16):
        expected = tower(one.pixel_values, grid_thw=torch.tensor([[1, 4, 4]]))
        outputs = [
            tower(one.pixel_values, grid_thw=torch.tensor([[1, 4, 4]]), picture_ids=[id(one)]) for _ in range(2)
        ]
    assert expected.pooler_output.dtype == torch.bfloat16
    for output in outputs:
        assert len(output.deepstack_features) == 2
        for found, native in zip(
            [output.pooler_output, *output.deepstack_features],
            [expected.pooler_output, *expected.deepstack_features],
            strict=True,
        ):
            assert not found.requires_grad
            assert torch.equal(found, native)
            assert found.dtype == native.dtype


class Watcher(TrainerCallback):
    """Gradients and rewards of every step."""

    trainer: GADTrainer

    def __init__(self) -> None:
        self.seen: list[dict[str, torch.Tensor]] = []
        self.held: list[bool] = []

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.adversary.optimizer.optimizer.register_step_pre_hook(self.of_discriminator)

    def of_discriminator(self, *args: Any) -> None:
        self.seen.append({"rewards": torch.empty(0)} | gradients("d.", self.trainer.discriminator))

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        if not self.seen:
            return  # resumed behind the discriminator's step
        assert self.trainer.scores is not None
        if self.trainer.step_plan.at(self.trainer.state.global_step).first:
            self.seen[-1]["rewards"] = self.trainer.scores.students
        self.seen[-1] |= gradients(f"p{self.trainer.state.global_step}.", self.trainer.policy)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.held.append(bool(self.trainer.features._entries))


def gradients(prefix: str, model: nn.Module) -> dict[str, torch.Tensor]:
    return {prefix + n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def run(
    tmp_path: Path, keep: bool = True, resume_from_checkpoint: str | None = None, **fields: Any
) -> tuple[Watcher, Counter]:
    """Stage 2 from the first step on, over all rows once, in several micro-batches."""
    watcher = Watcher()
    stage = dict(max_steps=3, gad_warmup_steps=0, discriminator_only_steps=0)
    fields = stage | dict(max_completion_length=15, max_tokens_per_micro_batch=200) | fields
    trainer = runs.trainer(tmp_path, callbacks=[watcher], **fields)
    watcher.trainer = trainer
    if not keep:
        trainer.features.hold = lambda groups: None
    counter = Counter(trainer.policy, trainer.discriminator.backbone, trainer._skeleton)
    trainer.train(resume_from_checkpoint=resume_from_checkpoint)
    assert trainer.reference is not None
    return watcher, counter


RUNS: dict[str, dict[str, Any]] = dict(
    frozen=dict(freeze_vision=True),
    adapters=dict(peft_config=lora(), discriminator_peft_config=lora()),
    one_row_per_sequence=dict(freeze_vision=True, share_prompt=False),
    iterations=dict(freeze_vision=True, num_iterations=2, max_steps=6),
    checkpointing=dict(
        peft_config=lora(), discriminator_peft_config=lora(), gradient_checkpointing=True
    ),
)  # fmt: skip


@pytest.mark.parametrize("kind", RUNS)
def test_a_run_reads_every_picture_once(kind: str, tmp_path: Path):
    watcher, counter = run(tmp_path, **RUNS[kind])
    plain, every_time = run(tmp_path, keep=False, **RUNS[kind])
    assert sum(counter.calls) == PATCHES_OF_ALL_ROWS
    # Discriminator, reference and policy, the last as often as there are iterations
    num_passes = 4 if kind == "iterations" else 3
    num_copies = 2 if kind == "one_row_per_sequence" else 1
    assert sum(every_time.calls) >= num_passes * num_copies * PATCHES_OF_ALL_ROWS
    assert len(every_time.calls) > 3 * num_passes, "one micro-batch a pass"
    assert len(watcher.seen) == len(plain.seen) == 3
    for found, expected in zip(watcher.seen, plain.seen, strict=True):
        assert {name.split(".")[0] for name in expected} >= {"rewards", "d"}
        assert any(name.startswith("p") and "language_model" in name for name in expected)
        assert found["rewards"].shape == (4, 2)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert not any(watcher.held[1::2] if kind == "iterations" else watcher.held)  # dropped with the rollout batch


def test_resumed_in_the_middle_of_a_rollout_batch(tmp_path: Path):
    fields: dict[str, Any] = RUNS["frozen"] | dict(num_iterations=3, max_steps=9, save_strategy="steps", save_steps=4)
    whole, counter = run(tmp_path, **fields)
    watcher, again = run(tmp_path, resume_from_checkpoint=str(tmp_path / "checkpoint-4"), **fields)
    # The second batch of three has two steps left: its pictures are read once more, and the third's
    first_batch = sum(counter.calls) - sum(again.calls)
    assert 0 < first_batch < PATCHES_OF_ALL_ROWS
    assert watcher.held == [True, False, True, True, False]
    torch.testing.assert_close(watcher.seen[-1], whole.seen[-1], rtol=1e-5, atol=1e-6)


def test_a_tower_that_trains_runs_every_time(tmp_path: Path):
    watcher, counter = run(tmp_path)
    assert sum(counter.calls) == 3 * PATCHES_OF_ALL_ROWS  # discriminator, reference, policy
    assert len(counter.calls) > 9
    for prefix in ("d.backbone.visual.", "p0.model.visual."):
        assert any(name.startswith(prefix) and bool(g.any()) for name, g in watcher.seen[0].items())


def test_an_evaluation_leaves_the_features_alone(tmp_path: Path):
    trainer = runs.trainer(tmp_path, freeze_vision=True, eval_dataset=runs.rows(3), max_completion_length=15)
    trainer.adversary.prepare([], 1)
    dataset: Any = trainer.train_dataset
    groups = [trainer.reader.read(row, dataset[row]) for row in (1, 2)]
    trainer.features.hold(groups)
    before = dict(trainer.features._entries)
    counter = Counter(trainer.policy, trainer.discriminator.backbone)
    trainer.evaluate()
    assert sum(counter.calls) == 24 + 2 * 16  # rows 1 and 2, by the discriminator
    assert trainer.features._entries == before
    assert not any(entry.features for entry in before.values())
