"""Generative Adversarial Distillation (GAD, arXiv 2511.10643) as a TRL trainer."""

from trl_gad.config import GADConfig
from trl_gad.discriminator import Discriminator
from trl_gad.trainer import GADTrainer


__version__ = "0.1.0"
__all__ = ["Discriminator", "GADConfig", "GADTrainer"]
