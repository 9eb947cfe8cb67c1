"""What is saved comes back: elsewhere, in part, or with a message that says why not."""

import json
import resource
import shutil
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from kimi_jax import canonical
from kimi_jax.interop.entries import InteropError
from kimi_jax.interop.load import load_variables
from kimi_jax.train import checkpoint_files as files
from kimi_jax.train.checkpoint import Checkpointer
from kimi_jax.train.checkpoint_files import CheckpointError
from kimi_jax.train.interrupt import Interrupt
from kimi_jax.train.step import State, init_state, make_transform
from tests import tiny

SMALL = ("model.num_layers=3", "model.attention=gqa", "model.residual.block_size=1")
DATA = {"tokens": "sha256:1", "tokenizer": "bytes"}


def make(*overrides):
    return tiny.make(*SMALL, *overrides)


def state_of(cfg, step=2):
    """A state whose every number is a random one."""
    variables = tiny.variables(cfg.model)
    shapes = jax.eval_shape(make_transform(cfg).init, variables["params"])
    rng = np.random.default_rng(step)
    optimizer = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), shapes
    )
    step = jnp.asarray(step, jnp.int32)
    return State(step, variables["params"], variables["balance"], optimizer)


def template(cfg, sharding=None):
    """What the loop restores into; no numbers."""
    sharding = sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        jax.eval_shape(lambda: init_state(cfg, make_transform(cfg))),
    )


def save(workdir, cfg, *states):
    with Checkpointer(workdir, cfg, DATA) as checkpoints:
        for state in states:
            checkpoints.save(state)


def assert_same(got, want, *models):
    got, want = (
        canonical.flatten(model, tree)
        for model, tree in zip(models, (got, want), strict=True)
    )
    assert got.keys() == want.keys() and len(got) > 10
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A workdir with steps 2 and 4, for tests that only read."""
    workdir, cfg = tmp_path_factory.mktemp("saved"), make()
    save(workdir, cfg, state_of(cfg, 2), state_of(cfg, 4))
    return workdir


@pytest.fixture
def copy(saved, tmp_path):
    """The same, for tests that write."""
    return shutil.copytree(saved, tmp_path / "copy")


def test_another_scan_layout_reads_the_same_numbers(saved):
    want = make()
    other = make("model.residual.block_size=2", "train.remat=unit")
    with Checkpointer(saved, other, DATA) as checkpoints:
        got = checkpoints.restore(template(other))
    shapes = [
        {x.shape for x in jax.tree.leaves(s.params)} for s in (got, state_of(want))
    ]
    assert shapes[0] != shapes[1]  # the scans do differ
    assert_same(got._asdict(), state_of(want, 4)._asdict(), other.model, want.model)


def test_another_mesh_and_back(saved, tmp_path):
    cfg = make()
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def where(leaf):
        axes = [None] * leaf.ndim
        if leaf.ndim > 2 and leaf.shape[-1] % 8 == 0:
            axes[-1] = "data"
        return NamedSharding(mesh, PartitionSpec(*axes))

    sharded = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where(x)),
        template(cfg),
    )
    with Checkpointer(saved, cfg, DATA) as checkpoints:
        got = checkpoints.restore(sharded)
    split = [x for x in jax.tree.leaves(got) if not x.sharding.is_fully_replicated]
    assert len(split) > 10
    for x, like in zip(jax.tree.leaves(got), jax.tree.leaves(sharded), strict=True):
        assert x.sharding == like.sharding
    model = cfg.model
    assert_same(got._asdict(), state_of(cfg, 4)._asdict(), model, model)
    save(tmp_path, cfg, got)
    with Checkpointer(tmp_path, cfg, DATA) as checkpoints:
        back = checkpoints.restore(template(cfg))
    assert_same(back._asdict(), state_of(cfg, 4)._asdict(), model, model)


def test_parameters_alone_in_another_dtype(saved):
    model = make("model.residual.block_size=2").model
    params = tiny.variables(make().model)["params"]
    for path in (saved, saved / "checkpoints" / "2"):
        got = load_variables(path, model, dtype="bfloat16")
        assert set(got) == {"params", "balance"}
        assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(got["params"]))
        want = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        assert_same(got["params"], want, model, make().model)
    assert_same(load_variables(saved, model)["params"], params, model, make().model)
    with pytest.raises(CheckpointError, match="holds no checkpoint; pass the workdir"):
        load_variables(saved / "nothing", model)


def test_a_checkpoint_of_another_model_is_named(saved):
    cfg = make("model.width=24", "model.residual.kind=none")
    with (
        Checkpointer(saved, cfg, DATA) as checkpoints,
        pytest.raises(CheckpointError) as caught,
    ):
        checkpoints.restore(template(cfg))
    text = str(caught.value)
    assert "params/embedding/embed: (272, 16) in the checkpoint, (272, 24) in" in text
    assert "residual/gain (16,): only in the checkpoint" in text
    deeper = make("model.num_layers=4").model
    with pytest.raises(InteropError, match=r"gqa/k: absent in the checkpoint, \("):
        load_variables(saved, deeper)


def test_what_lies_beside_the_arrays(saved):
    about = files.read_about(files.find(saved))
    assert about["data"] == DATA
    assert about["config"]["model"]["width"] == 16
    assert about["versions"]["jax"] == jax.__version__
    folded, wider = make("model.residual.block_size=2"), make("model.width=24")
    same = [
        about["parameters"]
        == canonical.fingerprint(
            canonical.flatten(
                cfg.model, {"params": tiny.variables(cfg.model)["params"]}
            )
        )
        for cfg in (make(), folded, wider)
    ]
    assert same == [True, True, False]


def test_changed_data_are_refused_and_changed_versions_noted(saved, monkeypatch):
    cfg, notes = make(), []
    now = {**DATA, "tokens": "sha256:2"}
    with (
        Checkpointer(saved, cfg, now) as checkpoints,
        pytest.raises(CheckpointError, match="sha256:1 at the save, sha256:2 now"),
    ):
        checkpoints.restore(template(cfg))
    monkeypatch.setattr(files, "versions", lambda: {"jax": "99.0"})
    with Checkpointer(saved, cfg, DATA) as checkpoints:
        checkpoints.restore(template(cfg), notes.append)
    (note,) = notes
    assert f"saved with jax {jax.__version__}, resumed with 99.0" in note


def largest(folder):
    data = (p for p in folder.rglob("*") if p.is_file())
    return max(data, key=lambda p: p.stat().st_size)


def missing(file):
    file.unlink()


def truncated(file):
    file.write_bytes(file.read_bytes()[:-10])


def flipped(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (missing, "is missing"),
        (truncated, r"has \d+ of \d+ bytes"),
        (flipped, "has other contents"),
    ],
)
def test_damage_is_named_with_the_way_back(copy, harm, words):
    cfg, folder = make(), copy / "checkpoints" / "4"
    harm(largest(folder))
    with pytest.raises(CheckpointError, match=words) as caught:
        load_variables(copy, cfg.model)
    text = str(caught.value)
    assert f"checkpoint {folder} is damaged: state/" in text
    assert f"step 2 is intact: read {copy / 'checkpoints' / '2'} instead" in text
    assert f"remove {folder} and run the same command" in text
    load_variables(copy / "checkpoints" / "2", cfg.model)
    shutil.rmtree(folder)
    with Checkpointer(copy, cfg, DATA) as checkpoints:
        assert int(checkpoints.restore(template(cfg)).step) == 2


@pytest.mark.parametrize("name", [files.ABOUT, files.FILES, "_METADATA"])
@pytest.mark.parametrize("harm", [missing, truncated])
def test_damage_of_what_describes_the_arrays(copy, name, harm):
    harm(copy / "checkpoints" / "4" / "state" / name)
    shutil.rmtree(copy / "checkpoints" / "2" / "state")  # a deletion cut short
    cfg = make()
    with (
        Checkpointer(copy, cfg, DATA) as checkpoints,
        pytest.raises(CheckpointError, match=f"is damaged: state/{name}") as caught,
    ):
        checkpoints.restore(template(cfg))
    assert "no older one is intact" in str(caught.value)


def test_the_last_few_and_every_kth_are_kept(tmp_path):
    cfg = make(
        "train.checkpoint_every=1",
        "train.checkpoint_keep=2",
        "train.checkpoint_keep_every=3",
    )
    state = state_of(cfg)
    steps = [state._replace(step=np.asarray(s, np.int32)) for s in range(1, 9)]
    save(tmp_path, cfg, *steps[:4])
    assert files.steps(tmp_path) == [3, 4]
    save(tmp_path, cfg, *steps[4:])
    assert files.steps(tmp_path) == [3, 6, 7, 8]


def test_a_step_is_durable_after_its_last_byte(tmp_path, monkeypatch):
    cfg, release = make(), threading.Event()
    finalize = files.StateHandler.finalize

    def held(self, directory):
        assert release.wait(30)
        finalize(self, directory)

    with Checkpointer(tmp_path, cfg, DATA) as checkpoints:
        checkpoints.save(state_of(cfg, 1))
        checkpoints.wait()
        monkeypatch.setattr(files.StateHandler, "finalize", held)
        host = jax.tree.map(np.array, state_of(cfg, 2))
        checkpoints.save(host)
        # The loop goes on and overwrites what it handed over.
        host.params["embedding"]["embed"][:] = 0
        assert checkpoints.latest_step() == 1 and files.steps(tmp_path) == [1]
        assert [saved.step for saved in checkpoints.take_durable()] == [1]
        assert checkpoints.take_durable() == []
        release.set()
        checkpoints.wait()
        assert checkpoints.latest_step() == 2 and files.steps(tmp_path) == [1, 2]
        (saved,) = checkpoints.take_durable()
    assert saved.step == 2 and saved.bytes > 10_000
    assert 0 < saved.blocking_seconds <= saved.seconds
    got = load_variables(tmp_path, cfg.model)["params"]
    assert_same(got, tiny.variables(cfg.model)["params"], cfg.model, cfg.model)


# orbax's event loop is gone when the last of the failed writes reports to it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_disk_that_fills_in_the_background_spares_the_last_one(tmp_path):
    cfg = make("train.checkpoint_keep=1")
    save(tmp_path, cfg, state_of(cfg, 2))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with (
        pytest.raises(CheckpointError, match="the last whole one is step 2"),
        Checkpointer(tmp_path, cfg, DATA) as checkpoints,
    ):
        checkpoints.latest_step()
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        try:
            checkpoints.save(state_of(cfg, 4))
            checkpoints.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (
        files.steps(tmp_path) == [2] and files.find_damage(files.find(tmp_path)) is None
    )
    # With room again the same step can be saved; what was left over is swept away.
    save(tmp_path, cfg, state_of(cfg, 4))
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["4"]


def test_a_damaged_config_says_where_its_copy_is(tmp_path):
    from kimi_jax.errors import UserError
    from kimi_jax.train import workdir

    workdir.claim(tmp_path, make())
    (tmp_path / "config.json").write_text('{"name": ')
    with pytest.raises(UserError, match=r"checkpoints/STEP/state/about\.json"):
        workdir.claim(tmp_path, make())


@pytest.fixture
def ctrl_c():
    """As on a terminal; commands in the background of a shell ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_second_signal_acts_at_once_whichever_it_is(ctrl_c, capfd):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), Interrupt("this step") as interrupt:
        signal.raise_signal(signal.SIGTERM)
        assert interrupt.agreed() == signal.SIGTERM == 143 - 128
        said = capfd.readouterr().err
        assert (
            said == "\nSIGTERM: stops after this step, which is saved; again: at once\n"
        )
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_about_is_json_that_people_can_read(saved):
    text = (files.find(saved) / "state" / files.ABOUT).read_text()
    assert json.loads(text) and text.count("\n") > 20


def test_what_is_saved_beside_the_state_is_durable_with_it(tmp_path):
    cfg = make("train.checkpoint_keep=2")
    with Checkpointer(tmp_path, cfg, DATA) as checkpoints:
        checkpoints.save(state_of(cfg, 1))
        with pytest.raises(CheckpointError, match=r"extra.bin cannot be read"):
            checkpoints.wait()
            checkpoints.restore_extra()
        checkpoints.save(state_of(cfg, 2), b"\0two")
        checkpoints.wait()
        assert checkpoints.restore_extra() == b"\0two"
    file = files.find(tmp_path) / files.STATE / files.EXTRA
    file.write_bytes(b"\0twa")
    assert files.find_damage(files.find(tmp_path)) is not None
    with pytest.raises(CheckpointError, match="step 1 is intact"):
        files.read_extra(files.find(tmp_path))
