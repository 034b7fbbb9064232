"""Distil a teacher's answers into Qwen3-VL.

    accelerate launch recipes/gad_qwen3vl.py --config recipes/demo.yaml [--learning_rate 1e-6 ...]

The YAML holds the fields of `RecipeArguments`, `GADConfig` and TRL's `ModelConfig`; the command line goes before it.
"""

from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from trl_gad import GADConfig, GADTrainer
from trl_gad.data import RecipeArguments, load_rows


def main(recipe: RecipeArguments, args: GADConfig, model: ModelConfig) -> None:
    if recipe.dataset == "demo":  # everything built in: see recipes/demo
        from demo.run import run  # noqa: PLC0415

        return run(args)
    args.model_init_kwargs = {
        "dtype": model.dtype, "attn_implementation": model.attn_implementation, "revision": model.model_revision
    } | (args.model_init_kwargs or {})  # fmt: skip
    dataset = load_rows(recipe.dataset, recipe.dataset_split)
    held_out = dataset.select(range(len(dataset) - recipe.eval_rows, len(dataset))) if recipe.eval_rows else None
    peft_config = get_peft_config(model)
    trainer = GADTrainer(
        model=model.model_name_or_path,
        discriminator=recipe.discriminator,
        args=args,
        train_dataset=dataset.select(range(len(dataset) - recipe.eval_rows)),
        eval_dataset=held_out,
        quantization_config=get_quantization_config(model),
        peft_config=peft_config,
        discriminator_peft_config=peft_config if recipe.discriminator is None else None,
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    if args.push_to_hub:
        trainer.push_to_hub()


if __name__ == "__main__":
    main(*TrlParser((RecipeArguments, GADConfig, ModelConfig)).parse_args_and_config())
