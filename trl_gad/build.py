"""Builds what a trainer is made of, before TRL touches the policy: policy, discriminator, skeleton of the reference."""

from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel, set_seed
from trl.trainer.utils import create_model_from_path, disable_dropout_in_model

from trl_gad.config import GADConfig
from trl_gad.discriminator import Discriminator, is_discriminator
from trl_gad.forward import freeze_vision_tower
from trl_gad.models import check_precision, structural_copy
from trl_gad.vision import share_vision_tower, use_matrix_patches


def load_model(path: str, args: GADConfig) -> PreTrainedModel:
    """A model as TRL's trainers load it: by the class its configuration names, in float32 unless told otherwise."""
    given: Any = args.model_init_kwargs or {}  # a dict: transformers has parsed a string
    kwargs: dict[str, Any] = dict(given)
    kwargs["device_map"] = None  # one whole model per process, on its device
    kwargs.setdefault("trust_remote_code", args.trust_remote_code)
    return create_model_from_path(path, **kwargs)


def build_models(
    model: "str | PreTrainedModel | PeftModel",
    discriminator: "str | Path | Discriminator | PreTrainedModel | None",
    args: GADConfig,
    peft_config: PeftConfig | None,
    discriminator_peft_config: PeftConfig | None,
    quantization_config: Any,
) -> "tuple[PreTrainedModel | PeftModel, Discriminator, PreTrainedModel | PeftModel]":
    """
    Returns:
        The policy (adapters added), the discriminator, and a structural copy of the policy that becomes the reference
        when stage 2 starts.

    Raises:
        ValueError: combinations that cannot be trained, with the way out.
    """
    set_seed(args.seed)  # adapters and heads start from random numbers
    if quantization_config is not None or "quantization_config" in (args.model_init_kwargs or {}):
        raise ValueError(
            "Quantized bases (`quantization_config`) are not in this version: the discriminator starts from the same "
            "weights and would have to share them. Load the model in bfloat16 with `peft_config` and "
            "`discriminator_peft_config`, which share one frozen base."
        )
    if isinstance(model, str):
        model = load_model(model, args)
    if isinstance(model, PeftModel) and peft_config is not None:
        raise ValueError(
            "`model` has adapters already and `peft_config` asks for new ones. Merge and save the model first, or "
            "leave `peft_config` unset."
        )
    for name, config in (("peft_config", peft_config), ("discriminator_peft_config", discriminator_peft_config)):
        if peft_config is not None and isinstance(config, LoraConfig) and config.bias != "none":
            raise ValueError(
                f"Policy and discriminator may share one frozen base, whose biases `{name}` would train "
                f"(bias={config.bias!r}). Set bias='none'."
            )
    use_matrix_patches(model)  # before it is copied
    # The discriminator starts from the policy's weights, adapters not counted: new ones change nothing yet
    adversary = _build_discriminator(model, discriminator, args, discriminator_peft_config, peft_config is not None)
    use_matrix_patches(adversary.backbone)  # of a given one
    if peft_config is not None:
        model = get_peft_model(model, peft_config)
    if args.freeze_vision:
        freeze_vision_tower(model)
        freeze_vision_tower(adversary.backbone)
        if discriminator is None:  # of a given one, the tower is its own
            share_vision_tower(model, adversary.backbone)
    disable_dropout_in_model(adversary)  # a reward is no matter of chance
    policy: Any = model
    if args.cast_lm_head_to_fp32 and policy.get_input_embeddings().weight is policy.get_output_embeddings().weight:
        raise ValueError(
            "`cast_lm_head_to_fp32` needs an LM head of its own, and this model ties its head to the input embeddings, "
            "which would be cast as well. Set cast_lm_head_to_fp32=False; float32 parameters with bf16=True keep the "
            "head's weights in float32."
        )
    check_precision(model, args.learning_rate, "policy")
    check_precision(adversary, args.discriminator_learning_rate, "discriminator")
    return model, adversary, structural_copy(model)


def _build_discriminator(
    policy: "PreTrainedModel | PeftModel",
    discriminator: "str | Path | Discriminator | PreTrainedModel | None",
    args: GADConfig,
    peft_config: PeftConfig | None,
    frozen_base: bool,
) -> Discriminator:
    if discriminator is None:
        if isinstance(policy, PeftModel) and peft_config is not None:
            raise ValueError(
                "`discriminator_peft_config` with a policy that comes with adapters: the discriminator's base would "
                "be a merged model that no folder holds. Merge and save the policy first and pass that folder as "
                "`model` (with `peft_config`), or pass `discriminator=`."
            )
        return Discriminator.from_policy(
            structural_copy(policy), peft_config, share_base=frozen_base and peft_config is not None
        )
    if isinstance(discriminator, (str, Path)) and is_discriminator(discriminator):
        discriminator = Discriminator.from_pretrained(discriminator)
    elif isinstance(discriminator, (str, Path)):
        discriminator = Discriminator.from_policy(load_model(str(discriminator), args), peft_config)
        peft_config = None
    elif isinstance(discriminator, PreTrainedModel):
        discriminator = Discriminator.from_policy(structural_copy(discriminator), peft_config)
        peft_config = None
    if peft_config is not None:
        raise ValueError(
            "`discriminator_peft_config` starts new adapters, and `discriminator` is a trained one already. Leave one "
            "of them unset."
        )
    ours, theirs = discriminator.config.get_text_config(), policy.config.get_text_config()
    if ours.vocab_size != theirs.vocab_size:
        raise ValueError(
            "The discriminator reads the policy's token ids, so both need the same vocabulary: "
            f"{ours.vocab_size} and {theirs.vocab_size} tokens. Pass a discriminator of the policy's family."
        )
    return discriminator
