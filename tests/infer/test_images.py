"""Features of images stand in for placeholders, whatever chunk these fall into."""

import jax
import numpy as np
import pytest

from kimi_jax.errors import UserError
from kimi_jax.infer.generator import Generator
from kimi_jax.infer.requests import Ask, Request
from kimi_jax.infer.sampling import Sampling
from kimi_jax.modules import transformer
from tests import tiny
from tests.infer import models
from tests.modules import vision_cases


def test_prompts_with_images_are_read_as_by_the_whole_pass():
    model = vision_cases.make().model
    variables = tiny.variables(model)
    prompt = models.tokens(0, 23)
    here = np.array([2, 3, 7, 8, 9, 17])
    prompt[here] = model.vision.placeholder
    features = np.random.default_rng(1).normal(size=(6, 16)).astype(np.float32)
    sizes = {"slots": 2, "length": 32, "page_size": 8, "read_chunk": 8}
    generator = Generator(model, variables, decode_steps=4, **sizes)
    plain = Request(tuple(models.tokens(2, 12)), Ask(2, Sampling(0.0)))
    shown = Request(tuple(prompt), Ask(3, Sampling(0.0)), features)
    done = generator.generate([plain, shown])[1]

    tokens = np.array([[*prompt, *done.tokens[:-1]]])
    out = jax.jit(transformer.apply, static_argnums=0)(
        model, variables, tokens, features_BMD=features[None]
    )
    logits = transformer.logits(out.h_BTD[0, 22:], out.unembed_DW)
    np.testing.assert_array_equal(done.tokens, logits.argmax(-1))
    want = jax.nn.log_softmax(logits).max(-1)
    np.testing.assert_allclose(done.logprobs, want, atol=2e-5)

    for tokens, rows in ((prompt, 5), ([*prompt, model.vision.placeholder], 7)):
        with pytest.raises(UserError, match="placeholders for"):
            generator.open(tokens, features_MD=features[:1].repeat(rows, 0))
