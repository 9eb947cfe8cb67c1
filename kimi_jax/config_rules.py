"""What must hold between the fields of a config, each rule with its fix."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from kimi_jax import config_rules_rl, config_rules_watch, sharding
from kimi_jax.config import (
    Balancing,
    Cluster,
    Config,
    Data,
    Model,
    MoE,
    Optimizer,
    Train,
    Vision,
    attention_kinds,
)

_ATTENTION = ("kda", "mla", "gqa")


def check(config: Config) -> list[str]:
    """Every broken rule, as a line that names the field and the fix."""
    problems = [*check_model(config.model), *_positive(_run_sizes(config))]
    kinds = _ATTENTION if [*_pattern(config.model)] else attention_kinds(config.model)
    problems += _train(config.train)
    problems += _room(config.train, config.model.vision)
    problems += _optimizer(config.optimizer, kinds)
    problems += _data(config)
    if not problems and -1 not in dataclasses.astuple(config.mesh):
        problems += sharding.misfits(config, dataclasses.asdict(config.mesh))
    problems += _mixtures(config.data)
    problems += _seeds(config)
    problems += _cluster(config.cluster)
    problems += config_rules_watch.check(config)
    problems += config_rules_rl.check(config)
    return problems


def check_model(model: Model) -> list[str]:
    """The broken rules of the model alone."""
    problems = list(_positive(_model_sizes(model)))
    pattern = list(_pattern(model))
    kinds = _ATTENTION if pattern else attention_kinds(model)
    return problems + pattern + list(_model(model, kinds))


_Sizes = dict[str, tuple[Any, tuple[str, ...]]]


def _model_sizes(model: Model) -> _Sizes:
    """What must be at least one: for a section, its values and the fields."""
    vision: _Sizes = {}
    if model.vision is not None:
        names = [field.name for field in dataclasses.fields(model.vision)]
        whole = [n for n in names if isinstance(getattr(model.vision, n), int)]
        sizes = tuple(n for n in whole if n != "placeholder")
        vision = {"model.vision": (model.vision, sizes)}
    return vision | {
        "model": (model, ("vocab_size", "width", "num_layers")),
        "model.kda": (
            model.kda,
            ("num_heads", "key_dim", "value_dim", "conv_width", "gate_rank"),
        ),
        "model.mla": (
            model.mla,
            ("num_heads", "q_rank", "kv_rank", "nope_dim", "value_dim", "block_size"),
        ),
        "model.gqa": (
            model.gqa,
            ("num_heads", "num_kv_heads", "head_dim", "block_size"),
        ),
        "model.ffn": (model.ffn, ("width",)),
        "model.moe": (
            model.moe,
            ("num_experts", "num_active", "expert_width", "latent_width"),
        ),
    }


def _run_sizes(config: Config) -> _Sizes:
    return {
        "train": (
            config.train,
            (
                "steps",
                "batch_size",
                "seq_len",
                "micro_batches",
                "loss_chunk",
                "log_every",
                "eval_every",
                "eval_batches",
                "checkpoint_every",
                "checkpoint_keep",
                "checkpoint_keep_every",
                "max_skips",
            ),
        ),
        "alerts": (config.alerts, ("dead_steps",)),
        "sample": (config.sample, ("num_tokens",)),
        "evaluation": (config.evaluation, ("examples", "batch_tokens", "max_length")),
    }


def _positive(sizes: _Sizes) -> Iterator[str]:
    """Sizes that are below one, wherever they are used."""
    for section, (values, names) in sizes.items():
        for name in names:
            size = getattr(values, name)
            if size is not None and size < 1:
                yield f"config.{section}.{name}={size}: must be at least 1"


def _pattern(model: Model) -> Iterator[str]:
    name = f"config.model.attention={model.attention}"
    if not model.attention:
        yield f"{name}: empty; name at least one of {list(_ATTENTION)}"
        return
    length = 0
    for item in model.attention:
        kind, star, count = item.partition("*")
        if kind.strip() not in _ATTENTION:
            yield f"{name}: {kind.strip()!r} is not one of {list(_ATTENTION)}"
        if star and not (count.strip().isdigit() and int(count) > 0):
            yield f"{name}: {item!r}; write a repeat as 'kda*3'"
            return
        length += int(count) if star else 1
    if length > model.num_layers:
        yield (
            f"{name}: names {length} layers, but config.model.num_layers="
            f"{model.num_layers}; shorten the pattern or add layers"
        )
    if not 0 <= model.ffn.num_dense_layers <= model.num_layers:
        yield (
            f"config.model.ffn.num_dense_layers={model.ffn.num_dense_layers}: "
            f"must be between 0 and num_layers={model.num_layers}"
        )


def _model(model: Model, kinds: Sequence[str]) -> Iterator[str]:
    if "kda" in kinds:
        yield from _kda(model)
    if "mla" in kinds:
        mla = model.mla
        if mla.pe_dim < 0:
            yield f"config.model.mla.pe_dim={mla.pe_dim}: must not be negative"
        if mla.positions == "rope" and (mla.pe_dim < 2 or mla.pe_dim % 2):
            yield (
                f"config.model.mla.pe_dim={mla.pe_dim}: rotary positions need an "
                "even number of at least 2"
            )
    if "gqa" in kinds:
        gqa = model.gqa
        if gqa.num_heads % gqa.num_kv_heads:
            yield (
                f"config.model.gqa.num_heads={gqa.num_heads}: not divisible by "
                f"num_kv_heads={gqa.num_kv_heads}; try num_kv_heads=1"
            )
        if gqa.positions == "rope" and gqa.head_dim % 2:
            yield f"config.model.gqa.head_dim={gqa.head_dim}: rotary needs an even size"
    if model.ffn.num_dense_layers < model.num_layers:
        yield from _moe(model.moe)
    yield from _residual(model)
    if model.vision is not None:
        yield from _vision(model.vision, model)


def _kda(model: Model) -> Iterator[str]:
    kda = model.kda
    if not -5.0 <= kda.gate_lower_bound < 0.0:
        yield (
            f"config.model.kda.gate_lower_bound={kda.gate_lower_bound}: must be in "
            "[-5, 0); below -5 a 16-token tile leaves the range of float32"
        )
    if kda.chunk_size not in (16, 32, 64, 128):
        yield (
            f"config.model.kda.chunk_size={kda.chunk_size}: allowed are 16, 32, 64, 128"
        )


def _moe(moe: MoE) -> Iterator[str]:
    if moe.num_active > moe.num_experts:
        yield (
            f"config.model.moe.num_active={moe.num_active}: more than num_experts="
            f"{moe.num_experts}"
        )
    if moe.capacity_factor < 1.0:
        yield (
            f"config.model.moe.capacity_factor={moe.capacity_factor}: must be at least "
            "1, or slots are dropped under an even load too"
        )
    if moe.num_shared < 0:
        yield f"config.model.moe.num_shared={moe.num_shared}: must not be negative"
    if moe.router_input == "latent" and moe.latent_width is None:
        yield (
            "config.model.moe.router_input='latent': needs latent_width; set it or "
            "use router_input='full'"
        )
    if moe.latent_norm and moe.latent_width is None:
        yield (
            "config.model.moe.latent_norm=True: needs latent_width; set it or use "
            "latent_norm=False"
        )
    yield from _balancing(moe.balancing, moe)


def _balancing(balancing: Balancing, moe: MoE) -> Iterator[str]:
    where = "config.model.moe.balancing"
    if balancing.bins < 2:
        yield f"{where}.bins={balancing.bins}: must be at least 2"
    if not 0.0 <= balancing.ema < 1.0:
        yield f"{where}.ema={balancing.ema}: must be in [0, 1); 0 keeps no history"
    if not 0.0 <= balancing.low <= balancing.high <= 1.0:
        yield (
            f"{where}.low={balancing.low}, high={balancing.high}: must be quantiles "
            "with 0 <= low <= high <= 1"
        )
    if balancing.step <= 0.0:
        yield f"{where}.step={balancing.step}: must be positive"
    if balancing.aux_weight < 0.0:
        yield f"{where}.aux_weight={balancing.aux_weight}: must not be negative"
    fits = moe.num_active <= balancing.threshold_cap <= moe.num_experts
    if balancing.method == "quantile_threshold" and not fits:
        yield (
            f"{where}.threshold_cap={balancing.threshold_cap}: must be between "
            f"num_active={moe.num_active} and num_experts={moe.num_experts}"
        )


def _vision(vision: Vision, model: Model) -> Iterator[str]:
    where = "config.model.vision"
    if vision.head_dim % 4:
        yield (
            f"{where}.head_dim={vision.head_dim}: must be a multiple of 4; channels "
            "turn in pairs, every other pair along x"
        )
    if vision.width % 2:
        yield f"{where}.width={vision.width}: must be even; half of the time code sines"
    if not 0 <= vision.placeholder < model.vocab_size:
        yield (
            f"{where}.placeholder={vision.placeholder}: must be a token below "
            f"config.model.vocab_size={model.vocab_size}, one that no text contains"
        )
    for name in ("rope_base", "projector_norm_eps"):
        if not getattr(vision, name) > 0.0:
            yield f"{where}.{name}={getattr(vision, name)}: must be positive"


def _room(train: Train, vision: Vision | None) -> Iterator[str]:
    """Room for images in a row."""
    patches, items = train.row_patches, train.row_items
    where = f"config.train.row_patches={patches}, row_items={items}"
    if patches < 0 or items < 0 or bool(patches) != bool(items):
        yield f"{where}: both at least 1, or both 0 for rows of text only"
    elif patches and vision is None:
        yield (
            f"{where}: config.model.vision is none, so nothing can read images; set "
            "both to 0, or use a config with that section"
        )
    elif vision is not None and vision.merge >= 1 and patches % vision.merge**2:
        square = vision.merge**2
        yield (
            f"{where}: patches are merged by {square}; use row_patches="
            f"{-(-patches // square) * square}"
        )


def _residual(model: Model) -> Iterator[str]:
    size = model.residual.block_size
    if size != 0.5 and (size < 1 or size != int(size)):
        yield (
            f"config.model.residual.block_size={size}: a whole number of layers, or "
            "0.5 for one sublayer"
        )


def _train(train: Train) -> Iterator[str]:
    if train.micro_batches >= 1 and train.batch_size % train.micro_batches:
        legal = [n for n in range(1, train.batch_size + 1) if train.batch_size % n == 0]
        near = sorted(legal, key=lambda n: abs(n - train.micro_batches))[:2]
        yield (
            f"config.train.batch_size={train.batch_size}: not divisible by "
            f"micro_batches={train.micro_batches}; try micro_batches={near[0]}"
        )
    if train.z_loss < 0.0:
        yield f"config.train.z_loss={train.z_loss}: must not be negative"
    multiples = train.eval_length_multiples
    if multiples[:1] != (1,) or list(multiples) != sorted(set(multiples)):
        yield (
            f"config.train.eval_length_multiples={multiples}: must begin with 1, the "
            "training length, and increase, such as (1, 4)"
        )
    keep, every = train.checkpoint_keep_every, train.checkpoint_every
    if keep is not None and keep >= 1 and every >= 1 and keep % every:
        yield (
            f"config.train.checkpoint_keep_every={keep}: only steps that are saved can "
            f"be kept; use a multiple of checkpoint_every={every}, or None"
        )


def _optimizer(optimizer: Optimizer, kinds: Sequence[str]) -> Iterator[str]:
    where = "config.optimizer"
    for name in ("learning_rate", "clip_norm", "muon_update_rms", "qk_clip"):
        value = getattr(optimizer, name)
        if value is not None and value <= 0.0:
            yield f"{where}.{name}={value}: must be positive"
    if optimizer.qk_clip is not None and not {"mla", "gqa"} & set(kinds):
        yield (
            f"{where}.qk_clip={optimizer.qk_clip}: there is no softmax attention to "
            "clip, and KDA normalises its queries and keys; use qk_clip=none, or add "
            "'mla' or 'gqa' to config.model.attention"
        )
    if optimizer.weight_decay < 0.0:
        yield f"{where}.weight_decay={optimizer.weight_decay}: must not be negative"
    for name in ("warmup_fraction", "final_fraction"):
        if not 0.0 <= getattr(optimizer, name) <= 1.0:
            yield f"{where}.{name}={getattr(optimizer, name)}: must be in [0, 1]"
    warmup, decay = optimizer.warmup_fraction, optimizer.decay_fraction
    if not 0.0 < decay <= 1.0:
        yield f"{where}.decay_fraction={decay}: must be in (0, 1]"
    elif optimizer.schedule == "wsd" and warmup + decay > 1.0:
        yield (
            f"{where}.decay_fraction={decay}: the decay would begin before the warm-up "
            f"ends; with warmup_fraction={warmup} use at most {1.0 - warmup:g}"
        )
    for name in ("muon_momentum", "adam_b1", "adam_b2"):
        if not 0.0 <= getattr(optimizer, name) < 1.0:
            yield f"{where}.{name}={getattr(optimizer, name)}: must be in [0, 1)"


def _data(config: Config) -> Iterator[str]:
    sources = config.data.sources
    if not sources:
        yield (
            "config.data.sources=(): empty; name a file, directory or token store, or "
            "'' for the default corpus"
        )
    twice = sorted({name for name in sources if sources.count(name) > 1})
    if twice:
        yield f"config.data.sources: {twice[0]!r} is named twice; name it once"
    yield from _generated(config.data)
    if not config.data.tokenizer:
        yield "config.data.tokenizer='': write 'bytes' or the path of a tokenizer file"
    fraction = config.data.validation_fraction
    if not 0.0 < fraction < 1.0:
        yield f"config.data.validation_fraction={fraction}: must be between 0 and 1"
    sizes = dataclasses.asdict(config.mesh)
    for axis, size in sizes.items():
        if size != -1 and size < 1:
            yield f"config.mesh.{axis}={size}: a number of devices, or -1 for the rest"
    if list(sizes.values()).count(-1) > 1:
        yield "config.mesh: only one axis may be -1, which takes the devices left over"
    if config.sample.temperature < 0.0:
        yield f"config.sample.temperature={config.sample.temperature}: must be >= 0"


def _seeds(config: Config) -> Iterator[str]:
    """JAX's keys and numpy's generators both take 32 bits without a sign."""
    for section in ("train", "data", "evaluation"):
        seed = getattr(config, section).seed
        if not 0 <= seed < 2**32:
            yield f"config.{section}.seed={seed}: must be 0 or more, and below 2**32"


def _generated(data: Data) -> Iterator[str]:
    """Rules of sources that are generated tasks or expert episodes."""
    kinds = {"task:": "a generated task", "episodes:": "expert episodes", "": "text"}
    of = {
        source: next(
            kind for prefix, kind in kinds.items() if source.startswith(prefix)
        )
        for source in data.sources
    }
    made = [source for source, kind in of.items() if kind != "text"]
    other = [source for source in of if made and of[source] != of[made[0]]]
    if other:
        yield (
            f"config.data.sources: {made[0]!r} is {of[made[0]]} and {other[0]!r} is "
            f"{of[other[0]]}; train on one kind"
        )
    if made and (data.strata or data.strata_mixture):
        yield "config.data.strata: generated tasks and episodes have no strata; use ()"


def _mixtures(data: Data) -> Iterator[str]:
    strata = data.strata
    if any(low >= high for low, high in zip((0, *strata), strata, strict=False)):
        yield (
            f"config.data.strata={strata}: boundaries must be at least 1 and increase, "
            f"such as {tuple(sorted({max(1, size) for size in strata}))}"
        )
    if data.strata_mixture and not strata:
        yield (
            "config.data.strata_mixture: there are no strata to weigh; set "
            "config.data.strata to boundaries in tokens, such as (4096,)"
        )
    yield from _mixture("mixture", data.mixture, None)
    yield from _mixture("strata_mixture", data.strata_mixture, len(strata) + 1)


def _mixture(
    name: str, rows: tuple[tuple[float, ...], ...], parts: int | None
) -> Iterator[str]:
    """Rules of a schedule of weights; `parts` weights a row, None: any equal number."""
    where = f"config.data.{name}"
    if rows and parts is None:
        parts = max(1, len(rows[0]) - 1)
    fractions = [row[0] for row in rows if row]
    rising = all(low < high for low, high in itertools.pairwise(fractions))
    if fractions and not (fractions[0] == 0.0 and rising and fractions[-1] < 1.0):
        yield (
            f"{where}: rows begin at {fractions} of the run; the first must begin at "
            "0.0, the others later and later, below 1.0"
        )
    for i, row in enumerate(rows):
        weights = row[1:]
        if len(weights) != parts:
            yield (
                f"{where}[{i}]={row}: must be (fraction, {parts} weights), has "
                f"{len(weights)} weights"
            )
        elif not all(weight >= 0.0 and math.isfinite(weight) for weight in weights):
            yield f"{where}[{i}]={row}: weights must be numbers of 0 or more"
        elif not sum(weights) > 0.0:
            yield (
                f"{where}[{i}]={row}: the weights sum to zero; give one of them a "
                "positive weight"
            )


def _cluster(cluster: Cluster) -> Iterator[str]:
    where = "config.cluster"
    for name, least in (("processes", 1), ("process", 0), ("timeout", 1)):
        value = getattr(cluster, name)
        if value is not None and value < least:
            yield f"{where}.{name}={value}: must be at least {least}"
    if cluster.processes and cluster.process and cluster.process >= cluster.processes:
        yield (
            f"{where}.process={cluster.process}: processes count from 0 to "
            f"{cluster.processes - 1}, as config.cluster.processes={cluster.processes}"
        )
    if cluster.coordinator is not None:
        host, _, port = cluster.coordinator.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            yield (
                f"{where}.coordinator={cluster.coordinator!r}: write HOST:PORT of "
                "process 0, such as 10.0.0.1:8476"
            )
