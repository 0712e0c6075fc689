"""How much memory a stage needs on each rank, and a served model on each GPU, from a few formulas.

N parameters, D width, Q = heads x head width, K = key-value heads x head width, M width of the MLP, V ids,
c bytes of a number in a forward pass; a row has L + T tokens. Tests hold the formulas to what autograd keeps
for a Llama. Not counted: the CUDA context, what the allocator holds back, image tokenizer, vision encoder and
the masks of padded rows; leave a fifth of the memory free for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PretrainedConfig

from unirl.trainer.stages import RunSettings, Stage

__all__ = [
    "MemoryEstimate",
    "ModelShape",
    "TrainingPlan",
    "estimate_memory",
    "lora_parameters",
    "serving_bytes",
    "stage_plan",
]

ADAM_BYTES = 8
"""Two float32 moments of each trained parameter."""
SAVED_LOGITS_BYTES = 13
"""Of one response token and one id, kept for the backward pass: three float32 arrays and a mask."""
LOGITS_GRADIENT_BYTES = 8
"""Of the same, while their gradients are in flight: two float32 arrays."""
SCORING_LOGITS_BYTES = 17
"""Of the same, without gradient: four float32 arrays and a mask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder that memory depends on."""

    num_parameters: int
    """N."""
    num_layers: int
    width: int
    """D."""
    query_width: int
    """Q."""
    key_width: int
    """K."""
    mlp_width: int
    """M."""
    vocabulary: int
    """V."""

    @classmethod
    def of(cls, config: PretrainedConfig, *, num_parameters: int | None = None) -> ModelShape:
        """Read the sizes off a configuration of transformers; of a model with several, off that of its text.

        Args:
            config: Of the model.
            num_parameters: N. None counts those of a Llama of these sizes; a mixture of experts or a model
                with a vision encoder has more.
        """
        text: Any = config.get_text_config()
        width, heads = int(text.hidden_size), int(text.num_attention_heads)
        head_width = int(getattr(text, "head_dim", None) or width // heads)
        shape = cls(
            num_parameters=0,
            num_layers=int(text.num_hidden_layers),
            width=width,
            query_width=heads * head_width,
            key_width=int(getattr(text, "num_key_value_heads", None) or heads) * head_width,
            mlp_width=int(getattr(text, "intermediate_size", None) or 4 * width),
            vocabulary=int(text.vocab_size),
        )
        embeddings = (1 if text.tie_word_embeddings else 2) * shape.vocabulary * width
        counted = embeddings + shape.num_layers * shape.layer_parameters + width
        return cls(**asdict(shape) | {"num_parameters": num_parameters or counted})

    @property
    def layer_parameters(self) -> int:
        """Of one layer: D (2 Q + 2 K) + 3 D M + 2 D."""
        attention = 2 * self.query_width + 2 * self.key_width
        return self.width * (attention + 3 * self.mlp_width + 2)

    def layer_activation_bytes(self, compute_bytes: int) -> int:
        """What one layer keeps of one token for the backward pass: 16 D + c (2 Q + 2 K + 4 M), c of 2 or 4.

        Each of the two norms keeps its input in float32, one result where c is 4 and two where it is 2;
        attention keeps query, key, value and its result, and no matrix of L x L; the MLP keeps both branches,
        the gate and the product.
        """
        inner = 2 * self.query_width + 2 * self.key_width + 4 * self.mlp_width
        return 16 * self.width + compute_bytes * inner

    def cache_bytes(self, tokens: int, *, number_bytes: int) -> int:
        """Keys and values of so many tokens: 2 layers K tokens numbers."""
        return 2 * self.num_layers * self.key_width * tokens * number_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """How a stage is trained, as far as memory depends on it. Rows are those of one rank."""

    rows: int
    """Samples in one forward and backward pass."""
    rollout_rows: int
    """Samples that are decoded at a time."""
    scored_rows: int
    """Samples that are scored without gradient at a time."""
    prompt_length: int
    """L."""
    response_length: int
    """T."""
    ranks: int = 1
    """Over which FSDP2 shards weights, gradients, optimizer and reference."""
    weight_bytes: int = 4
    """Of a trained number; the optimizer's state and gradients are float32."""
    compute_bytes: int = 4
    """c: 2 in mixed precision."""
    trained_parameters: int | None = None
    """None trains all, against a copied reference; LoRA trains few, and the reference is the model itself."""
    has_own_critic: bool = False
    """Whether the critic has a trunk of its own, as many layers as the policy and trained like it."""
    has_reference_here: bool = True
    """False where a copied reference waits in the host's memory."""
    is_guided: bool = False
    """Whether each row is run a second time, without its condition."""
    is_checkpointed: bool = False
    """Whether only the input of each layer is kept, and the layer run again in the backward pass."""
    logits_chunk: int = 0
    """Response tokens whose logits are held at a time; 0 holds those of all rows."""
    engine_bytes: int = 4
    """Of a number in the engine's own copy of the weights, on each rank; 0 for an engine elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes of one rank."""

    weights: int
    gradients: int
    optimizer: int
    reference: int
    engine: int
    """The engine's copy of the weights."""
    gathered: int
    """What FSDP2 holds whole for a moment: parameters outside the layers, two layers, gradients of one."""
    activations: int
    logits: int
    """Of the update, with their gradients."""
    scoring: int
    """Logits where rollouts are scored before the update, without gradient."""
    cache: int
    """Keys and values of the rollout."""

    @property
    def standing(self) -> int:
        """What is held all the time."""
        return self.weights + self.optimizer + self.reference + self.engine

    @property
    def update(self) -> int:
        """At the peak of the update."""
        return self.standing + self.gathered + self.gradients + self.activations + self.logits

    @property
    def rollout(self) -> int:
        """At the peak of rolling out, or of scoring what was rolled out, whichever is more."""
        return self.standing + self.gathered + max(self.cache, self.scoring)

    @property
    def peak(self) -> int:
        """The most of the whole step."""
        return max(self.update, self.rollout)

    def parts(self) -> Mapping[str, int]:
        """Every number by name, the sums last."""
        return {**asdict(self), "update": self.update, "rollout": self.rollout, "peak": self.peak}


def estimate_memory(shape: ModelShape, plan: TrainingPlan) -> MemoryEstimate:
    """Say what one rank needs for a stage.

    weights w N / n, gradients 4 N' / n, optimizer 8 N' / n, reference w N / n or nothing, with N' the trained
    parameters and n the ranks; activations as `ModelShape.layer_activation_bytes` says, logits as the
    constants of this module say, per token of `rows`; the cache as `ModelShape.cache_bytes` says, for
    `rollout_rows`. A critic of its own adds its layers to N and N', and their activations.
    """
    second = shape.num_layers * shape.layer_parameters if plan.has_own_critic else 0
    trained = shape.num_parameters + second
    if plan.trained_parameters is not None:
        trained = plan.trained_parameters * (2 if plan.has_own_critic else 1)
    tokens = (plan.prompt_length + plan.response_length) * (2 if plan.is_guided else 1)
    read_by_critic = plan.prompt_length + plan.response_length if plan.has_own_critic else 0
    layer = shape.layer_activation_bytes(plan.compute_bytes)
    kept = shape.width * plan.compute_bytes if plan.is_checkpointed else layer
    of_token = shape.num_layers * kept + (layer if plan.is_checkpointed else 0)
    cached = shape.cache_bytes(
        plan.rollout_rows * tokens, number_bytes=plan.engine_bytes or plan.compute_bytes
    )
    return MemoryEstimate(
        weights=_share(plan.weight_bytes * (shape.num_parameters + second), plan.ranks),
        gradients=_share(4 * trained, plan.ranks),
        optimizer=_share(ADAM_BYTES * trained, plan.ranks),
        reference=_share(plan.weight_bytes * shape.num_parameters, plan.ranks)
        if plan.trained_parameters is None and plan.has_reference_here
        else 0,
        engine=plan.engine_bytes * shape.num_parameters,
        gathered=_gathered(shape, plan) if plan.ranks > 1 else 0,
        activations=plan.rows * (tokens + read_by_critic) * of_token,
        logits=_logits(shape, plan, plan.rows) * (SAVED_LOGITS_BYTES + LOGITS_GRADIENT_BYTES),
        scoring=_logits(shape, plan, plan.scored_rows) * SCORING_LOGITS_BYTES,
        cache=cached if plan.engine_bytes else 0,
    )


def stage_plan(
    stage: Stage,
    settings: RunSettings,
    *,
    prompt_length: int,
    response_length: int,
    ranks: int = 1,
    trained_parameters: int | None = None,
) -> TrainingPlan:
    """Read off a stage and a run's settings how many rows are in flight, and what is held of them.

    Args:
        stage: Group size, updates and guidance.
        settings: Prompts or tokens in one pass, precision, and the engine; vLLM's own memory is not counted.
        prompt_length: L, tokens of the longest prompt.
        response_length: T, see `Policy.max_response_length`.
        ranks: Processes that share the model under FSDP2.
        trained_parameters: See `TrainingPlan`; `lora_parameters` counts those of adapters.
    """
    rollout_rows = settings.micro_prompts * stage.group_size
    rows = max(settings.micro_prompts // stage.updates_per_step, 1) * stage.group_size
    packed = max(settings.micro_batch_tokens // (prompt_length + response_length), 1)
    spread = settings.distribution
    return TrainingPlan(
        rows=packed if settings.micro_batch_tokens else rows,
        rollout_rows=rollout_rows,
        scored_rows=packed if settings.micro_batch_tokens else rollout_rows,
        prompt_length=prompt_length,
        response_length=response_length,
        ranks=ranks,
        compute_bytes=4 if spread.mixed_precision == "no" else 2,
        trained_parameters=trained_parameters,
        has_own_critic=settings.critic == "own",
        is_guided=stage.sampling.guidance != 1.0,
        is_checkpointed=spread.checkpoint_activations,
        has_reference_here=not spread.offload_reference,
        logits_chunk=settings.logits_chunk,
        engine_bytes=4 if settings.rollout == "native" else 0,
    )


def lora_parameters(shape: ModelShape, rank: int) -> int:
    """Parameters of adapters in every linear layer: rank (in + out) of each."""
    attention = 2 * (shape.width + shape.query_width) + 2 * (shape.width + shape.key_width)
    return shape.num_layers * rank * (attention + 3 * (shape.width + shape.mlp_width))


def serving_bytes(
    shape: ModelShape, *, tokens: int, number_bytes: int = 2, cache_number_bytes: int = 2, gpus: int = 1
) -> int:
    """What one GPU needs to serve a model that is split over `gpus`: (weights + cache) / gpus.

    Args:
        shape: Of the model.
        tokens: In flight at a time, over all requests.
        number_bytes: Of a weight.
        cache_number_bytes: Of a number in the cache.
        gpus: Tensor-parallel degree.
    """
    weights = number_bytes * shape.num_parameters
    return _share(weights + shape.cache_bytes(tokens, number_bytes=cache_number_bytes), gpus)


def _logits(shape: ModelShape, plan: TrainingPlan, rows: int) -> int:
    """Logits that are held at a time, of both branches."""
    positions = rows * plan.response_length
    if plan.logits_chunk:
        positions = min(positions, max(plan.logits_chunk, rows))
    return positions * shape.vocabulary * (2 if plan.is_guided else 1)


def _gathered(shape: ModelShape, plan: TrainingPlan) -> int:
    outside = shape.num_parameters - shape.num_layers * shape.layer_parameters
    return plan.compute_bytes * (outside + 2 * shape.layer_parameters) + 4 * shape.layer_parameters


def _share(total: int, ranks: int) -> int:
    return -(-total // ranks)
