"""A run as data: stages in the order in which they are trained."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from unirl.algorithms.schedule import Decay
from unirl.trainer.alarms import AlarmSettings
from unirl.trainer.distribution import Distribution
from unirl.trainer.scoring import Scoring
from unirl.types import MODALITIES, CriticKind, Direction, SamplingSettings

__all__ = [
    "FIRST_EVALUATION",
    "AlgorithmName",
    "Carried",
    "Lesson",
    "ModalitySettings",
    "RunSettings",
    "Stage",
]

AlgorithmName = Literal[
    "ppo", "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "dapo", "gspo", "drpo"
]
"""`unirl.trainer.algorithms.ALGORITHMS` says what each is made of."""

FIRST_EVALUATION = "start"
"""What the evaluation before the first stage is called where the others have their stage's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """Other prompts from some step of a stage on."""

    from_step: int
    """Steps of the stage that are done before it, 1 or more."""
    prompts: str
    """SQL condition that picks the prompts from there on."""


Carried = Literal["optimizer", "critic", "reference"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModalitySettings:
    """Coefficients for the tokens of one modality. None takes the stage's own."""

    loss_weight: float = 1.0
    """Of all that these tokens add to the loss, each modality divided by its own number of tokens."""
    kl_coef: float | None = None
    kl_target: float | None = None
    entropy_coef: float | None = None
    entropy_target: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """RL on one set of prompts, in one direction or in both."""

    name: str
    direction: Direction | Literal["both"]
    """What the policy writes. "both": of the prompts of a step one half is answered with text, the other with
    pictures, `micro_prompts` in turn, and one update learns from both."""
    prompts: str
    """SQL condition that picks the prompts from the data store."""
    steps: int
    """Rollouts, each followed by one update phase."""
    kl_budget: float | None = None
    """Divergence from the reference, nats a token, at which the stage ends early. None lets it go on."""
    plateau_evaluations: int = 0
    """Evaluations in a row without a better judge after which the stage ends early; 0 lets it go on. Where no
    direction of the stage has a judge, the evaluation's reward stands in. Set `evaluate_every` of the run."""
    plateau_gain: float = 0.0
    """Share of accepted samples (or reward) by which that must rise to count as better."""
    scoring: Scoring | None = None
    """Makes the reward of this stage. None takes the recipe's."""
    curriculum: tuple[Lesson, ...] = ()
    """Prompts of later steps, in the order of their steps."""
    success_window: tuple[float, float] | None = None
    """Lowest and highest success rate, the mean of a prompt's scores, at which it is still drawn: what is
    solved or out of reach rests. Prompts that were never tried are drawn too. None draws from all."""
    success_every: int = 10
    """Steps after which rates are looked at again."""
    success_steps: int = 50
    """Last steps whose samples count in a rate; a prompt without one is drawn again."""
    success_of: str = "reward"
    """Column of the experience that is the success: "reward", or "reward/COMPONENT"."""
    carry: tuple[Carried, ...] = get_args(Carried)
    """What goes on from the stage before, besides the weights. What is not named starts anew: the optimizer's
    moments, the critic, and the reference, which becomes the policy as it is when the stage starts."""
    text: ModalitySettings = field(default_factory=ModalitySettings)
    image: ModalitySettings = field(default_factory=ModalitySettings)

    prompts_per_step: int = 16
    """P, over all ranks."""
    group_size: int = 8
    """G."""
    sampling_rounds: int = 1
    """Rollouts of a step at most, each of `prompts_per_step` further prompts, until so many prompts have
    samples that differ in reward (dynamic sampling); 1 takes what comes."""
    offline_prompts: int = 0
    """Groups of earlier samples of the stage, out of the run's experience, that each step also learns from,
    over all ranks. Set `importance`: their weights cover the way from the policy that drew them."""
    offline_staleness: int = 4
    """Steps that they may be old."""
    temperature: float = 1.0
    guidance: float = 1.0
    """How far past the conditional logits tokens are drawn: uncond + guidance (cond - uncond). 1 is off."""
    guidance_mode: Literal["exact", "detach_uncond", "unguided"] = "exact"
    """What is trained where guidance is not 1. "exact": the guided policy, through both branches;
    "detach_uncond": the guided policy, with no gradient into the unconditional branch; "unguided": the policy
    at guidance 1 is rolled out and trained, and only evaluations are guided."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    """These three cut ids off, which cannot be trained with: anything but their neutral value is refused."""
    max_words: int = 8
    """Longest text response, words without `<eos>`. The limit is part of the task: a response that reaches it
    has ended, and is scored as it stands."""

    learning_rate: float = 2e-4
    critic_learning_rate: float = 2e-3
    warmup_steps: int = 10
    """Rollouts over which the learning rate rises."""
    learning_rate_decay: Decay = "constant"
    """How it falls from there to the last step of the stage."""
    learning_rate_floor: float = 0.0
    """Share of the learning rate that it falls to, in [0, 1]."""
    max_grad_norm: float = 1.0
    updates_per_step: int = 2
    """Optimizer steps in one pass over a rollout; each takes every n-th prompt."""
    epochs: int = 1
    """Passes over a rollout."""

    algorithm: AlgorithmName = "ppo"
    gamma: float = 1.0
    lam: float = 0.95
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    """Largest ratio that a negative advantage is charged for; 3 is usual. None charges for any."""
    drpo_epsilon: float = 0.2
    """Shift of probability at which drpo stops pushing."""
    value_clip: float | None = 0.2
    """How far a value may move from the one before the update and still count, reward units; None clips
    nothing."""
    advantage_norm: Literal["batch", "modality", "group", "none"] | None = None
    """Over what token advantages are shifted to mean 0 and scaled to deviation 1: the step, the step's tokens
    of one modality, or the samples of one prompt. None leaves it to the algorithm: the step, or nothing."""
    critic_warmup_steps: int = 0
    """First steps of the stage in which the critic alone learns and the policy stays as it is."""
    critic_warmup_from: Literal["rollouts", "data"] = "rollouts"
    """What it learns from there: samples of the policy, or the true responses of the stage's prompts, scored
    like samples."""
    entropy_coef: float = 0.0
    """Weight of the mean entropy of a token, taken off the loss."""
    entropy_target: float | None = None
    """Entropy, nats a token, under which the bonus comes on and grows; above it there is none. None keeps the
    weight as it is. Pictures have far more entropy than words: set `text` and `image` apart."""
    entropy_step: float = 0.005
    """Change of that weight in one step."""
    replay_prompts: int = 0
    """Captioned pictures of the warm-up that each step also learns from, supervised, in the direction that
    this stage does not train. They keep the policy from forgetting it. Over all ranks."""
    replay_coef: float = 1.0
    """Weight of their loss."""
    kl_coef: float = 0.02
    """First weight of the penalty on the divergence from the reference, reward or loss per nat."""
    kl_in: Literal["reward", "loss"] | None = None
    """Whether the penalty is taken off the reward or added to the loss. None leaves it to the algorithm."""
    kl_estimator: str = "k3"
    """Of the penalty in the loss: k1, k2 or k3."""
    kl_straight_through: bool = False
    """Take the gradient of k2, which is right on-policy, whatever the estimator's value."""
    kl_target: float | None = 0.05
    """Divergence per token, nats, that the adaptive weight steers to. None keeps the first weight."""
    reference_every: int = 0
    """Steps after which the policy as it is becomes the reference; 0 keeps that of the stage's start."""
    kl_horizon: int = 10_000
    """Samples over which the weight can change by about a fifth per unit of error."""
    importance: Literal["none", "token", "sequence"] = "none"
    """Weigh tokens, or whole responses, by how much likelier the trainer makes them than the engine did."""
    importance_limit: float = 2.0
    """Largest of these weights."""
    importance_mask: float = 0.0
    """Factor between trainer and engine, either way, beyond which the weight is 0; 0 masks nothing."""
    overlong_buffer: int = 0
    """Words before the limit over which a text is charged for its length; 0 charges nothing."""
    overlong_factor: float = 1.0
    """Charge at the limit, in reward units."""

    @property
    def directions(self) -> tuple[Direction, ...]:
        """What the policy writes in this stage."""
        return MODALITIES if self.direction == "both" else (self.direction,)

    def of(self, direction: Direction) -> Stage:
        """The stage as it is for one modality: in its direction, with the coefficients that hold there."""
        own = self.text if direction == "text" else self.image
        names = ("kl_coef", "kl_target", "entropy_coef", "entropy_target")
        values = {name: getattr(own, name) for name in names if getattr(own, name) is not None}
        return replace(self, direction=direction, **values)

    def loss_weight(self, direction: Direction) -> float:
        """Of the tokens of one modality."""
        return (self.text if direction == "text" else self.image).loss_weight

    @property
    def sampling(self) -> SamplingSettings:
        """What is rolled out, trained and compared with the reference."""
        guidance = 1.0 if self.guidance_mode == "unguided" else self.guidance
        return SamplingSettings(temperature=self.temperature, guidance=guidance)

    @property
    def samples_per_step(self) -> int:
        """B, over all ranks."""
        return self.prompts_per_step * self.group_size


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """What holds for all stages."""

    alarms: AlarmSettings = field(default_factory=AlarmSettings)
    """When an alarm is raised, and whether it stops the run."""
    distribution: Distribution = field(default_factory=Distribution)
    """What each process holds and computes in."""
    critic: CriticKind = "shared"
    """"shared": two layers read values off the policy's trunk and do not move it; there is no second model.
    "own": a trunk of its own, at the start a copy of the policy's, that learns with `critic_learning_rate`;
    set that to a rate for a whole model."""
    seed: int = 0
    micro_prompts: int = 8
    """Prompts whose samples go through the model at once, in rollout and update. The split of work into
    forward passes does not depend on the number of ranks, so neither do the numbers."""
    micro_batch_tokens: int = 0
    """Tokens, padding included, that go through the model at once when samples are scored and learnt from:
    rows are sorted by length, packed up to this, and dealt out so that ranks have equal work. 0 keeps the
    micro-batches of the rollout, `micro_prompts` prompts each."""
    logits_chunk: int = 0
    """Positions whose logits are held at once, so that no (B, T, V) is made; the backward pass makes them a
    second time. 0 holds all."""
    checkpoint_every: int = 10
    """Steps."""
    checkpoint_every_s: float = 0.0
    """Seconds after which the end of a step is saved whatever its number; 0 counts steps alone."""
    keep_checkpoints: int = 2
    """Newest ones that stay. The best stays as well: by the judge, by the reward where there is no judge."""
    stop_grace_s: float = 14.0
    """Seconds from SIGTERM or SIGUSR1 after which the process ends whatever it is doing."""
    evaluate_every: int = 0
    """Steps between evaluations inside a stage; 0 evaluates at the start and after each stage only."""
    rollout: Literal["native", "vllm"] = "native"
    """Engine that samples: the native one, or vLLM (in this process, or the server that UNIRL_ROLLOUT_URL
    names)."""
    max_logprob_gap: float = 1e-3
    """Largest difference, nats, between what the rollout says of its tokens and what the trainer says. Above
    it the first step of a stage refuses to train: the two would not be the same policy."""
