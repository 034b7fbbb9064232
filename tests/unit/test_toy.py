"""The toy of the GAD paper: a student that can hold one mode, and a teacher with two.

Ten classes. The teacher is a mixture of two Gaussians over them, of which the student sees samples only; the student is
one Gaussian with a mean and a width. Cross-entropy on the teacher's samples covers both modes, so the student mostly
says what the teacher never does, the classes between them. GAD with the library's own loss and advantages settles on
one mode.
"""

import pytest
import torch

from trl_gad.losses import advantages, bradley_terry


CLASSES = torch.arange(10.0)
MODES = (2, 7)
BETWEEN = [4, 5]
NUM_GENERATIONS = 8
NUM_PROMPTS = 32


def gaussian(mean: torch.Tensor, log_width: torch.Tensor) -> torch.Tensor:
    """Log-probs of the classes `[10]`."""
    return torch.log_softmax(-((CLASSES - mean) ** 2) / (2 * torch.exp(2 * log_width)), dim=0)


def teacher() -> torch.Tensor:
    """Probabilities `[10]`: 0.6 and 0.4 on the two modes, each with a width of 0.6."""
    width = torch.tensor(0.6).log()
    first, second = (gaussian(torch.tensor(float(mode)), width).exp() for mode in MODES)
    return 0.6 * first + 0.4 * second


def start(mean: float) -> list[torch.nn.Parameter]:
    """The student's mean and the logarithm of its width, 1."""
    return [torch.nn.Parameter(torch.tensor(mean)), torch.nn.Parameter(torch.tensor(0.0))]


def supervised(student: list[torch.nn.Parameter], num_steps: int) -> None:
    """Cross-entropy on samples of the teacher."""
    optimizer = torch.optim.Adam(student, lr=0.05)
    for _ in range(num_steps):
        samples = teacher().multinomial(NUM_PROMPTS * NUM_GENERATIONS, replacement=True)
        optimizer.zero_grad()
        (-gaussian(*student)[samples].mean()).backward()
        optimizer.step()


def adversarial(student: list[torch.nn.Parameter], num_steps: int) -> None:
    """GAD: one discriminator and one policy step per batch. The discriminator is a table of ten scores."""
    scores = torch.nn.Parameter(torch.zeros(10))
    of_student = torch.optim.Adam(student, lr=0.01)
    of_discriminator = torch.optim.Adam([scores], lr=0.1)
    for _ in range(num_steps):
        answers = teacher().multinomial(NUM_PROMPTS, replacement=True)
        samples = gaussian(*student).exp().detach().multinomial(NUM_PROMPTS * NUM_GENERATIONS, replacement=True)
        rewards = scores.detach()[samples][:, None]
        values, _ = advantages(rewards, torch.ones(1), NUM_GENERATIONS, "group", "sum_then_normalize")
        of_discriminator.zero_grad()
        loss = bradley_terry(scores[answers.repeat_interleave(NUM_GENERATIONS)], scores[samples])
        (loss / len(samples)).backward()
        of_discriminator.step()
        of_student.zero_grad()
        (-(values * gaussian(*student)[samples]).mean()).backward()
        of_student.step()


def masses(student: list[torch.nn.Parameter]) -> tuple[float, float, float]:
    """Probability of the classes between the modes, and of each mode with its two neighbours."""
    p = gaussian(*student).exp().detach()
    first, second = (float(p[mode - 1 : mode + 2].sum()) for mode in MODES)
    return float(p[BETWEEN].sum()), first, second


@pytest.mark.parametrize(("seed", "mean"), enumerate([2.5, 3.0, 3.4, 5.8, 6.5]))
def test_supervised_spreads_and_gad_settles_on_one_mode(seed: int, mean: float):
    """Both from the same start, which leans to one side: from the very middle, either way the student stays wide."""
    torch.manual_seed(seed)
    student = start(mean)
    supervised(student, 200)
    between, first, second = masses(student)
    assert between > 0.2  # 0.25 was found, the teacher has 0.003
    assert min(first, second) > 0.2  # 0.25 and 0.36

    student = start(mean)
    adversarial(student, 400)
    between, first, second = masses(student)
    assert between < 0.04  # at most 0.01 was found
    assert (first if mean < 4.5 else second) > 0.93  # 0.98 and more
    assert 0.4 < float(student[1].exp()) < 0.85  # the width of a mode is 0.6; 0.55 to 0.67 was found
