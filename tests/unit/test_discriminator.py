"""Saving and loading the discriminator, what it starts from, and whose weights it has."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel

from tests import runs, tiny
from trl_gad import Discriminator
from trl_gad.models import structural_copy


MODELS = dict(qwen3_vl=tiny.qwen3_vl, qwen2_5_vl=tiny.qwen2_5_vl, qwen3_text=tiny.qwen3_text)
VISION_MODELS = ["qwen3_vl", "qwen2_5_vl"]
TARGETS = r".*layers\.\d+\.self_attn\.(q_proj|v_proj)"  # of the text model, with any prefix or none

# What another process knows: folders, and inputs in a file in each
LOAD_AND_SCORE = """
import sys
from pathlib import Path
import torch
from trl_gad import Discriminator

for folder in map(Path, sys.argv[1:]):
    discriminator = Discriminator.from_pretrained(folder).eval()
    scores = discriminator(**torch.load(folder / "inputs.pt")).detach()
    torch.save((scores, type(discriminator.base).__name__), folder / "scores.pt")
"""


def lora() -> LoraConfig:
    return LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False)


def inputs(name: str) -> dict[str, Any]:
    """A prompt with a picture where the model reads them; scores at two places."""
    ids = list(range(40, 60))
    more: dict[str, Any] = {}
    if name in VISION_MODELS:
        ids[3:3] = [tiny.TOKEN_ID["<|vision_start|>"], *[tiny.TOKEN_ID["<|image_pad|>"]] * 2]
        torch.manual_seed(1)
        more["pixel_values"] = torch.randn(8, 3 * 2 * 8 * 8)  # 2 x 4 patches, 2 x 2 of them a token
        more["image_grid_thw"] = torch.tensor([[1, 2, 4]])
        more["mm_token_type_ids"] = (torch.tensor([ids]) == tiny.TOKEN_ID["<|image_pad|>"]).int()
    return dict(last=torch.tensor([10, len(ids) - 1]), input_ids=torch.tensor([ids]), **more)


def from_policy(name: str, **kwargs: Any) -> Discriminator:
    torch.manual_seed(5)
    return Discriminator.from_policy(structural_copy(MODELS[name]()), **kwargs)


def data_ptrs(model: torch.nn.Module) -> dict[str, int]:
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


def copied(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same(before: dict[str, torch.Tensor], model: torch.nn.Module) -> bool:
    return all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_score_by_hand():
    discriminator = from_policy("qwen3_text")
    hidden = discriminator.backbone(input_ids=inputs("qwen3_text")["input_ids"]).last_hidden_state[0]
    expected = [float((hidden[place] * discriminator.score.weight[0]).sum()) for place in (10, 19)]
    assert discriminator(**inputs("qwen3_text")).tolist() == pytest.approx(expected, rel=1e-5)


def test_the_score_is_float32_under_autocast():
    discriminator = from_policy("qwen3_text")
    with torch.autocast("cpu", torch.bfloat16):
        hidden = discriminator.backbone(input_ids=inputs("qwen3_text")["input_ids"]).last_hidden_state[0, [10, 19]]
        scores = discriminator(**inputs("qwen3_text"))
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, hidden.float() @ discriminator.score.weight[0], rtol=1e-6, atol=1e-6)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, torch.Tensor]]:
    """Discriminators in folders, loaded and scored by one new process: folder, and scores before saving."""
    root, result = tmp_path_factory.mktemp("saved"), {}
    for kind in (*MODELS, "qwen3_vl lora", "qwen3_text lora"):
        name, is_lora = kind.split()[0], kind.endswith("lora")
        discriminator = from_policy(name)
        if is_lora:
            MODELS[name]().save_pretrained(root / f"base of {kind}")
            model = type(MODELS[name]()).from_pretrained(root / f"base of {kind}")
            discriminator = Discriminator.from_policy(structural_copy(model), lora())
        result[kind] = (root / kind, discriminator.eval()(**inputs(name)).detach())
        discriminator.save_pretrained(root / kind)
        torch.save(inputs(name), root / kind / "inputs.pt")
    folders = [str(folder) for folder, _ in result.values()]
    subprocess.run([sys.executable, "-c", LOAD_AND_SCORE, *folders], check=True, cwd=Path(__file__).parents[2])
    return result


@pytest.mark.parametrize("kind", [*MODELS, "qwen3_vl lora", "qwen3_text lora"])
def test_saved_and_loaded_in_a_new_process(kind: str, saved: dict[str, tuple[Path, torch.Tensor]]):
    """G1 of the field reports: class, configuration and base model are found."""
    folder, expected = saved[kind]
    scores, class_name = torch.load(folder / "scores.pt")
    assert class_name == type(from_policy(kind.split()[0]).base).__name__
    assert torch.equal(scores, expected)
    assert expected[0] != expected[1]
    assert (folder / "model.safetensors").exists() == ("lora" not in kind)  # or the adapter and the head only


def test_an_adapter_whose_base_has_moved(saved: dict[str, tuple[Path, torch.Tensor]], tmp_path: Path):
    folder, expected = saved["qwen3_text lora"]
    tiny.qwen3_text().save_pretrained(tmp_path / "elsewhere")
    loaded = Discriminator.from_pretrained(folder, base_model=tmp_path / "elsewhere").eval()
    assert torch.equal(loaded(**inputs("qwen3_text")), expected)
    trainable = {name for name, parameter in loaded.named_parameters() if parameter.requires_grad}
    assert all("lora" in name or name == "score.weight" for name in trainable)
    assert len(trainable) == 3 * 2 * 2 + 1  # layers x projections x (A, B), and the head


def test_what_cannot_be_loaded(tmp_path: Path):
    tiny.qwen3_text().save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="model holds no discriminator: score_head.safetensors is not there"):
        Discriminator.from_pretrained(tmp_path / "model")
    from_policy("qwen3_text", peft_config=lora()).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="adapter and does not say of which base model.*Pass `base_model=`"):
        Discriminator.from_pretrained(tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter" / "discriminator_config.json").read_text())["base_model"] in ("", None)


def test_dtype_of_what_is_loaded(tmp_path: Path):
    from_policy("qwen3_text").save_pretrained(tmp_path)
    loaded = Discriminator.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert loaded.base.dtype == torch.bfloat16
    assert loaded.score.weight.dtype == torch.float32
    assert loaded(**inputs("qwen3_text")).dtype == torch.float32


def test_start_from_a_model_on_disk(tmp_path: Path):
    model: PreTrainedModel = tiny.qwen3_vl(seed=7)
    model.save_pretrained(tmp_path / "other")
    trainer = runs.trainer(tmp_path, discriminator=str(tmp_path / "other"))
    expected = Discriminator.from_policy(structural_copy(model))
    assert same(copied(expected.backbone), trainer.discriminator.backbone)


@pytest.mark.parametrize("lora_on_policy", [False, True])
def test_a_policy_with_adapters_is_merged(lora_on_policy: bool, tmp_path: Path):
    model: Any = tiny.qwen3_text()
    ids = inputs("qwen3_text")["input_ids"]
    if lora_on_policy:
        model = get_peft_model(model, lora()).eval()
    hidden = model(input_ids=ids, output_hidden_states=True).hidden_states[-1]
    before = copied(model)
    discriminator = Discriminator.from_policy(structural_copy(model)).eval()
    torch.testing.assert_close(discriminator.backbone(input_ids=ids).last_hidden_state, hidden, rtol=1e-5, atol=1e-5)
    assert same(before, model)
    assert all(parameter.requires_grad for parameter in discriminator.parameters())
    assert not set(data_ptrs(model).values()) & set(data_ptrs(discriminator).values())


def test_another_vocabulary_is_refused(tmp_path: Path):
    other: Any = tiny.qwen3_vl()
    other.resize_token_embeddings(tiny.VOCAB_SIZE + 8)
    with pytest.raises(ValueError, match=f"same vocabulary: {tiny.VOCAB_SIZE + 8} and {tiny.VOCAB_SIZE} tokens"):
        runs.trainer(tmp_path, discriminator=other)


def test_adapters_of_a_trained_discriminator_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="`discriminator_peft_config` starts new adapters"):
        runs.trainer(tmp_path, discriminator=from_policy("qwen3_vl"), discriminator_peft_config=lora())
    policy = get_peft_model(tiny.qwen3_vl(), lora())
    with pytest.raises(ValueError, match="`discriminator_peft_config` with a policy that comes with adapters"):
        runs.trainer(tmp_path, model=policy, discriminator_peft_config=lora())
    with pytest.raises(ValueError, match="has adapters already"):
        runs.trainer(tmp_path, model=policy, peft_config=lora())


def test_full_fine_tuning_trains_two_models(tmp_path: Path):
    # One step of D alone
    trainer = runs.trainer(
        tmp_path, max_steps=1, gad_warmup_steps=0, max_completion_length=15, discriminator_max_grad_norm=0.0
    )
    assert not set(data_ptrs(trainer.policy).values()) & set(data_ptrs(trainer.discriminator).values())
    policy, discriminator = copied(trainer.policy), copied(trainer.discriminator)
    trainer.train()
    assert same(policy, trainer.policy)
    moved = {n for n, v in trainer.discriminator.state_dict().items() if not torch.equal(v, discriminator[n])}
    assert {"score.weight", "backbone.language_model.embed_tokens.weight"} <= moved

    # The policy, D at a rate of (nearly) 0
    trainer = runs.trainer(
        tmp_path, max_steps=2, gad_warmup_steps=0, discriminator_only_steps=0, discriminator_learning_rate=1e-30
    )
    policy, discriminator = copied(trainer.policy), copied(trainer.discriminator)
    trainer.train()
    for name, value in trainer.discriminator.state_dict().items():
        torch.testing.assert_close(value, discriminator[name], rtol=0, atol=1e-20)
    assert not same(policy, trainer.policy)


def test_adapters_on_both_share_one_base(tmp_path: Path):
    trainer = runs.trainer(tmp_path, peft_config=lora(), discriminator_peft_config=lora(), max_completion_length=15)
    policy, discriminator = trainer.policy, trainer.discriminator
    frozen = {p.data_ptr() for p in discriminator.parameters() if not p.requires_grad}
    own = {p.data_ptr() for p in discriminator.parameters() if p.requires_grad}
    assert frozen <= {p.data_ptr() for p in policy.parameters() if not p.requires_grad}
    assert len(frozen) > 30
    assert not own & {p.data_ptr() for p in policy.parameters()}
    before = {model: copied(model) for model in (policy, discriminator)}
    trainer.train()
    for model in (policy, discriminator):
        moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[model][n])}
        trained = {n for n, p in model.named_parameters() if p.requires_grad}
        assert moved == trained
        assert all("lora" in name or name == "score.weight" for name in trained)
    # Still shared after training, and by the reference
    assert frozen == {p.data_ptr() for p in discriminator.parameters() if not p.requires_grad}
    assert trainer.reference is not None
    assert frozen <= set(data_ptrs(trainer.reference).values())


def test_an_adapter_configuration_for_a_language_model_serves_the_discriminator_too():
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    discriminator = Discriminator.from_policy(tiny.qwen3_vl(), config)
    assert config.task_type == "CAUSAL_LM"  # the caller's own
    trained = [name for name, p in discriminator.named_parameters() if p.requires_grad]
    assert all("lora_" in name or name == "score.weight" for name in trained)


def test_a_shared_base_with_trained_biases_is_refused(tmp_path):
    config = LoraConfig(r=2, target_modules=["q_proj"], bias="all")
    with pytest.raises(ValueError, match="bias='none'"):
        runs.trainer(tmp_path, peft_config=config, discriminator_peft_config=config)
