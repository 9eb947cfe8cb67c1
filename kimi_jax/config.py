"""The schema of an experiment: every field, its type, and what it means.

An experiment file (`configs/*.py`) returns an `ml_collections.ConfigDict` of plain
values. `from_dict` turns it into the frozen dataclasses below, which the rest of the
library takes. Nothing is defaulted here: values live in `configs/`, meaning lives
here. All problems of a config are reported at once, before anything compiles.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

AttentionKind = Literal["kda", "mla", "gqa"]


@dataclasses.dataclass(frozen=True)
class KDA:
    """Kimi Delta Attention (Kimi K3 report Sec. 2.1; Kimi Linear report Sec. 3)."""

    num_heads: int
    key_dim: int
    value_dim: int
    conv_width: int | None  # taps of the causal short convolution; None: no convolution
    gate: Literal["bounded", "softplus"]
    gate_lower_bound: float  # nats a token; the bounded gate's floor, in [-5, 0)
    gate_granularity: Literal[
        "channel", "head"
    ]  # one decay per key channel or per head
    gate_rank: int
    output_gate: Literal["full", "low_rank", "none"]
    chunk_size: int
    # Kept for the backward pass of one layer, where train.remat keeps anything of it.
    residuals: Literal["all", "states", "none"]
    implementation: str | None  # None: the fastest that this device runs


@dataclasses.dataclass(frozen=True)
class MLA:
    """Gated multi-head latent attention (Kimi K3 report Eq. 7)."""

    num_heads: int
    q_rank: int | None  # None: queries are projected directly
    kv_rank: int
    nope_dim: int  # per head, from the latent
    pe_dim: int  # shared by the heads; rotated only with positions="rope"
    value_dim: int
    output_gate: bool
    positions: Literal["none", "rope"]
    rope_base: float
    latent_norm_eps: float
    block_size: int  # side of an attention tile


@dataclasses.dataclass(frozen=True)
class GQA:
    """Plain grouped-query softmax attention, the baseline."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    positions: Literal["none", "rope"]
    rope_base: float
    block_size: int


@dataclasses.dataclass(frozen=True)
class FFN:
    """Dense feed-forward layers and the activation that all FFNs share."""

    num_dense_layers: int  # the first layers, which have no experts
    width: int
    activation: Literal["situ", "swiglu"]
    situ_beta: float
    situ_linear_beta: float


@dataclasses.dataclass(frozen=True)
class Balancing:
    """How expert loads are kept even (Kimi K3 report Sec. 2.3, App. C and D)."""

    method: Literal[
        "quantile",
        "quantile_exact",
        "quantile_threshold",
        "load_quantile",
        "sign",
        "aux_loss",
        "none",
    ]
    bins: int  # quantile, quantile_threshold: histogram resolution
    ema: float  # quantile: share of the old bias that is kept each step
    step: float  # sign, load_quantile: bias increment
    low: float  # load_quantile: experts under this quantile of loads are raised
    high: float  # load_quantile: experts over this quantile of loads are lowered
    threshold_cap: int  # quantile_threshold: most experts that a token may use
    aux_weight: float  # aux_loss: weight in the training loss


@dataclasses.dataclass(frozen=True)
class MoE:
    """Stable LatentMoE (Kimi K3 report Eq. 11)."""

    num_experts: int
    num_active: int
    num_shared: int
    expert_width: int
    latent_width: int | None  # None: experts read the full width
    latent_norm: bool
    router_input: Literal["full", "latent"]
    routed_scaling: float
    balancing: Balancing
    # How a device multiplies by its experts; None: the fastest that it runs. "padded"
    # gives every expert equal room and drops what does not fit.
    implementation: Literal["blocked", "ragged", "dense", "padded"] | None
    # How tokens travel where experts are split over devices (docs/expert_parallel.md).
    dispatch: Literal["capacity", "ragged"]
    capacity_factor: float  # room for tokens over an even load, at least 1


@dataclasses.dataclass(frozen=True)
class Residual:
    """What a sublayer reads (Attention Residuals report; Kimi K3 report Eq. 8-10).

    `block_size` is in layers; 0.5 makes every sublayer a source, which is full
    Attention Residuals. With kind "none" it only groups layers for `train.remat`.
    """

    kind: Literal["block_attention", "additive", "none"]
    block_size: float


@dataclasses.dataclass(frozen=True)
class Vision:
    """MoonViT-V2 and its projector (Kimi K3 report Sec. 2.4)."""

    patch_size: int  # pixels, each side
    width: int
    num_layers: int
    num_heads: int
    head_dim: int
    mlp_width: int
    position_rows: int  # of the learned grid of positions, resized to each image
    position_columns: int
    max_frames: int  # of one clip
    rope_base: float
    merge: int  # side of the squares of patches that become one position of the text
    projector_norm_eps: float
    placeholder: int  # the token whose positions the features of an image take
    block_size: int  # side of an attention tile


@dataclasses.dataclass(frozen=True)
class Model:
    vocab_size: int
    width: int
    num_layers: int
    # Repeated down the depth: ("kda*3", "mla") is a 3:1 hybrid. A pattern as long as
    # the model is an explicit list.
    attention: tuple[str, ...]
    norm_eps: float
    init_std: float
    # Of activations; parameters are float32. "float64" is for tests under x64.
    dtype: Literal["float32", "bfloat16", "float64"]
    kda: KDA
    mla: MLA
    gqa: GQA
    ffn: FFN
    moe: MoE
    residual: Residual
    vision: Vision | None  # None: text only


@dataclasses.dataclass(frozen=True)
class Data:
    # Each a file, directory, tree:DIRECTORY or token store, or "": the default corpus.
    # Or each a generated task, task:SPEC (docs/evaluations.md), or each expert episodes
    # of an environment, episodes:SPEC (docs/environments.md).
    sources: tuple[str, ...]
    # "bytes", the path of a tokenizer.json or tiktoken file, or "symbols:N".
    tokenizer: str
    # Filler of generated tasks of text: "generated", or text as in sources.
    haystack: str
    validation_fraction: float
    seed: int
    # "split" joins documents and cuts every seq_len; "best_fit" keeps them whole.
    packing: Literal["split", "best_fit"]
    # Rows of (fraction, weight of each source): from this fraction of the run on.
    # Empty: sources are read in proportion to their text.
    mixture: tuple[tuple[float, ...], ...]
    # Boundaries of document length, in tokens, <bos> and <eod> included; n boundaries
    # make n + 1 strata, which are packed apart.
    strata: tuple[int, ...]
    # As `mixture`, with a weight for each stratum. Empty: natural proportions.
    strata_mixture: tuple[tuple[float, ...], ...]


@dataclasses.dataclass(frozen=True)
class Optimizer:
    kind: Literal["muon", "adamw"]
    muon_per_head: bool  # orthogonalise each head of q, k, v by itself
    muon_momentum: float
    muon_update_rms: float  # of Muon's updates before the rate; AdamW's are near 0.2
    # That matrices are orthogonalised in, and travel in where they are split.
    muon_dtype: Literal["float32", "bfloat16"]
    # Of Muon's momentum and Adam's first moment; the second moment stays float32.
    momentum_dtype: Literal["float32", "bfloat16"]
    qk_clip: float | None  # largest attention logit that a head may keep; None: any
    learning_rate: float  # the peak
    schedule: Literal["cosine", "wsd"]  # after the warm-up; wsd holds, then decays
    warmup_fraction: float  # of the steps
    decay_fraction: float  # wsd: of the steps, the last ones
    decay_shape: Literal["linear", "one_minus_sqrt"]  # wsd: of that decay
    final_fraction: float  # of the peak rate, at the last step
    weight_decay: float
    clip_norm: float
    adam_b1: float
    adam_b2: float
    adam_eps: float


@dataclasses.dataclass(frozen=True)
class Train:
    steps: int
    batch_size: int  # sequences a step, over all devices and micro-batches
    seq_len: int
    row_patches: int  # room for patches of images in a sequence; 0: text only
    row_items: int  # room for images and clips in a sequence
    micro_batches: int
    seed: int
    # A checkpoint, native or published, whose parameters and router biases the run
    # starts from, with a fresh optimizer; "": random ones.
    init_from: str
    remat: Literal["none", "unit", "block", "nested"]
    loss_chunk: int  # tokens whose logits exist at one time
    z_loss: float
    log_every: int
    eval_every: int
    eval_batches: int
    # Held-out text is read in windows of these many seq_len; 1 comes first.
    eval_length_multiples: tuple[int, ...]
    checkpoint_every: int
    checkpoint_keep: int  # the last N
    checkpoint_keep_every: int | None  # and for good those of every K-th step
    # What follows a step whose loss, gradient or update is not finite, which is never
    # applied. "skip" goes on with the next batch.
    on_nonfinite: Literal["stop", "skip"]
    max_skips: int  # skip: most such steps in a row; one more stops the run


@dataclasses.dataclass(frozen=True)
class Alerts:
    """When a logged step is worth a warning (docs/health.md). None: never."""

    load_entropy: float | None  # of the loads of a layer's experts, below this
    dead_steps: int | None  # an expert without a token for this many steps in a row
    bias_update: float | None  # of a router bias in one step, above this
    loss_spike: float | None  # nats of one step above the running median
    throughput_drop: float | None  # share of the running median that is lost
    data_wait: float | None  # share of the time that the loop waits for data
    policy_kl: float | None  # nats a token from the sampler to the policy, above this
    mismatch: float | None  # mean gap of their log-probabilities before a step, above
    effective_samples: float | None  # share of tokens that weights leave, below this
    zero_variance: float | None  # share of groups whose members are all alike, above
    environment_errors: float | None  # share of trajectories, above this
    window: int  # log records in the running medians
    stop: tuple[str, ...]  # the alerts above that save and end the run


@dataclasses.dataclass(frozen=True)
class Sample:
    """The text generated at the end of training."""

    prompt: str
    num_tokens: int
    temperature: float


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """How `experiments.evaluate` measures."""

    examples: int  # of each task
    batch_tokens: int  # in one forward pass, or one row if that is longer
    max_length: int  # tokens of the longest instance that is tried
    seed: int


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Devices along each axis (see `kimi_jax/sharding.py`); one axis may be -1: all
    that are left."""

    data: int
    fsdp: int
    expert: int
    context: int
    tensor: int


@dataclasses.dataclass(frozen=True)
class TaskSampling:
    """Which tasks reinforcement learning draws (docs/rl.md)."""

    target_low: float  # success rates between these two are drawn most
    target_high: float
    floor: float  # least weight of a task, hard or easy, where 1 is that of the band
    ema: float  # share of the old success rate that is kept at an update
    # Success of the next shorter tasks that unlocks longer ones; 0: all from the start.
    length_threshold: float


@dataclasses.dataclass(frozen=True)
class RL:
    """Reinforcement learning on trajectories (docs/rl.md).

    An iteration draws tasks, lets the policy act on them, and takes some optimizer
    steps on what it did. Rows of a step are `train.batch_size` by `train.seq_len`.
    """

    environments: tuple[str, ...]  # specs, docs/environments.md
    # "shuffled" deals the rewards of an iteration to other trajectories: the control
    # that must learn nothing. "none" pays nothing, where a teacher alone is followed.
    rewards: Literal["task", "shuffled", "none"]
    iterations: int
    groups: int  # new ones an iteration; a group is trajectories of one task
    group_size: int
    steps_per_iteration: int
    turn_tokens: int  # most tokens of a turn of the policy
    max_turns: int
    max_tokens: int  # of a trajectory, prompt and answers of tools included
    # Decode calls of an iteration, after which unfinished trajectories are carried to
    # the next one; None: until all are done.
    max_calls: int | None
    max_seconds: float | None  # a trajectory that takes longer ends; None: never
    slots: int  # trajectories that are written at one time
    decode_steps: int  # most tokens of a call, after which finished turns are answered
    temperature: float
    top_p: float
    # What the reward is compared with in the group; "none": the reward as it is.
    advantage: Literal["mean", "mean_std", "leave_one_out", "none"]
    turn_credit: float  # share of the advantage that comes from process rewards
    length_penalty: float  # taken off the reward at twice length_budget tokens
    length_budget: int  # tokens of the policy in a trajectory that cost nothing
    ratio: Literal["token", "sequence"]
    clip_low: float  # ratios are clipped to 1 - clip_low ... 1 + clip_high
    clip_high: float
    # Most weight of a token whose sampler was another policy; None: no correction.
    correction_cap: float | None
    kl_weight: float  # of the divergence from the reference
    kl_to: str  # the reference: "start", parameters of step 0, or a checkpoint
    entropy_weight: float
    aggregate: Literal["token", "sequence"]  # what the loss is a mean over
    replay_routes: bool  # train with the experts that the sampler chose
    update_balance: bool  # router biases follow the loads in training
    max_staleness: int  # policy versions between a token and the step that learns it
    reuse: float  # share of old experience in a batch
    teacher: str  # a checkpoint to distil from on the policy's own turns; "": none
    distill_weight: float
    # Tokens of a segment that carries its state to the next one; None: whole rows.
    segment: int | None
    sampler: TaskSampling
    # Devices that write trajectories, after those of config.mesh; None: the same ones.
    rollout_mesh: Mesh | None
    eval_tasks: int  # held-out tasks of each cell, every train.eval_every steps
    keep_trajectories: int | None  # written down in an iteration; None: all of them


@dataclasses.dataclass(frozen=True)
class Cluster:
    """How the processes of one run find each other. None: as the launcher says."""

    coordinator: str | None  # HOST:PORT of process 0, the same in every process
    processes: int | None  # 1: work alone, whatever the launcher says
    process: int | None  # the number of this one, from 0
    timeout: int  # seconds to wait for all of them at the start


@dataclasses.dataclass(frozen=True)
class Monitor:
    """How a run is watched; changes none of its numbers."""

    profile: str  # "10:13" traces the steps 10, 11 and 12; empty: none
    prometheus_port: int | None  # where the latest record can be scraped; None: nowhere


@dataclasses.dataclass(frozen=True)
class Config:
    name: str
    model: Model
    data: Data
    optimizer: Optimizer
    train: Train
    alerts: Alerts
    sample: Sample
    evaluation: Evaluation
    mesh: Mesh
    cluster: Cluster
    monitor: Monitor
    rl: RL | None  # None: supervised training


def profile_steps(monitor: Monitor) -> range | None:
    """The steps that `profile` names; None for none.

    Raises:
      ValueError: it is not "FIRST:END" with 1 <= FIRST < END.
    """
    if not monitor.profile:
        return None
    first, _, end = monitor.profile.partition(":")
    if not (first.strip().isdecimal() and end.strip().isdecimal()):
        raise ValueError("write FIRST:END, such as 10:13 for the steps 10, 11 and 12")
    steps = range(int(first), int(end))
    if steps.start < 1 or not steps:
        raise ValueError("steps count from 1, and FIRST must be below END")
    return steps


def attention_kinds(model: Model) -> tuple[str, ...]:
    """The attention kind of each layer: the pattern, expanded and repeated."""
    pattern: list[str] = []
    for item in model.attention:
        kind, _, count = item.partition("*")
        pattern += [kind.strip()] * (int(count) if count else 1)
    repeats = -(-model.num_layers // len(pattern))
    return tuple((pattern * repeats)[: model.num_layers])


def ffn_kinds(model: Model) -> tuple[str, ...]:
    """The FFN kind of each layer: "mlp" for the first ones, "moe" for the rest."""
    dense = model.ffn.num_dense_layers
    return ("mlp",) * dense + ("moe",) * (model.num_layers - dense)
