"""Servers that do not fit a run: told by name before step 1, with nothing pushed and nothing written."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import xxhash

from holdfast.config.load import from_mapping
from holdfast.config.sections.engine import VLLMEngineConfig
from holdfast.config.verbs.grpo import GRPOConfig
from holdfast.errors import ConfigError, RunStopped
from holdfast.features.vllm.buckets import Leases
from holdfast.features.vllm.servers import VLLMServer
from holdfast.models.setup.model import blueprint
from tests.features.vllm.served import ServedModel, of_the_extension, served_tree, serving
from tests.features.vllm.test_served_runs import run


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"vocabulary": 80}, "serves another model: its vocabulary has 80 tokens, the policy's 64"),
        ({"tokenizer": "0" * 32}, "has another tokenizer than the policy"),
        ({"template": "0" * 32}, "has another chat template than the policy"),
        ({"dtype": "torch.bfloat16"}, r"computes in torch.bfloat16, and the trainer in torch.float32 \(--dtype\)"),
        ({"logprobs": "raw_logprobs"}, "tells raw_logprobs, which are of another temperature"),
        ({"longest": 40}, "has a context of 40 tokens, and data.max_length is 64"),
        ({"tied": True}, "ties its output layer, which vLLM 0.32 does not update"),
        ({"experts": True}, "serves a mixture of experts on a CPU"),
        ({"backend": None}, "takes no weights of ours"),
    ],
)
def test_a_server_that_does_not_fit_is_told_before_step_1(tmp_path: Path, facts: dict[str, Any], words: str) -> None:
    served = ServedModel(facts=facts)
    with serving(served) as url, pytest.raises(ConfigError, match=f"the server at {url} .*{words}"):
        run(tmp_path, served_tree([url], str(tmp_path)))

    assert not (tmp_path / "r").exists()
    assert not served.events  # nothing was pushed to it, and nothing sampled


def test_a_server_of_the_same_tokenizer_and_template_fits(tmp_path: Path) -> None:
    tree = served_tree(["http://127.0.0.1:9"], str(tmp_path))
    origin = blueprint(from_mapping(tree, GRPOConfig).model, tmp_path, seed=0)
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    origin.tokenizer.chat_template = template
    origin.tokenizer.save_pretrained(tmp_path / "served")
    digests = digests_of_the_extension(tmp_path / "served")
    assert digests["template"] == xxhash.xxh3_128_hexdigest(template.encode())

    served = ServedModel(facts={"tokenizer": digests["tokenizer"]})
    with serving(served) as url:
        tree["rollout"]["engine"]["url"] = [url]
        assert run(tmp_path, tree | {"steps": 1}).step == 1


def digests_of_the_extension(place: Path) -> dict[str, str]:
    """Return what a worker of vLLM says of a directory's tokenizer: its file is read, its imports of vLLM left out."""
    names = of_the_extension("PROBE = ", "_IDENTITY")
    names |= of_the_extension("@functools.cache\ndef tokenizer_digest", "PROBES = ", names)
    return {name: names[f"{name}_digest"](str(place)) for name in ("tokenizer", "template")}


def no_log_probabilities(path: str, told: Any) -> Any:
    """Answer as a server without them."""
    for choice in told.get("choices", ()):
        choice["logprobs"] = None
    return told


def no_token_ids(path: str, told: Any) -> Any:
    """Answer with text alone."""
    for choice in told.get("choices", ()):
        del choice["token_ids"]
    return told


def no_versions(path: str, told: Any) -> Any:
    """Answer without saying which weights sampled."""
    for choice in told.get("choices", ()):
        choice["weight_versions"] = None
    return told


@pytest.mark.parametrize("answer", [no_log_probabilities, no_token_ids, no_versions])
def test_answers_that_cannot_be_trained_on_end_a_run_before_step_1(tmp_path: Path, answer: Any) -> None:
    with (
        serving(ServedModel(answer=answer)) as url,
        pytest.raises(
            RunStopped, match=r"with choices\[0\]\.(logprobs|token_ids|weight_versions) (null|missing), where"
        ),
    ):
        run(tmp_path, served_tree([url], str(tmp_path)))

    assert not (tmp_path / "r").exists()


def test_another_engine_than_vllm_is_refused_by_name(tmp_path: Path) -> None:
    served = ServedModel(refused=frozenset({"/collective_rpc"}))
    with serving(served) as url, pytest.raises(ConfigError, match="SGLang and others do not"):
        run(tmp_path, served_tree([url], str(tmp_path)))


def test_no_server_is_told_by_its_address(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no server answers at http://127.0.0.1:9: start it with `holdfast serve"):
        run(tmp_path, served_tree(["http://127.0.0.1:9"], str(tmp_path)))


def test_a_server_that_another_run_pushes_to_is_refused_whatever_its_folder(tmp_path: Path) -> None:
    served = ServedModel()
    with serving(served) as url:
        server = VLLMServer.of(url, VLLMEngineConfig(url=[url]))
        other = Leases("other")
        other.take(server)
        tree = served_tree([url], str(tmp_path))
        tree["rollout"]["engine"]["folder"] = str(tmp_path)
        with pytest.raises(ConfigError, match=rf"another run pushes weights to {url} \(process {os.getpid()} on "):
            run(tmp_path, tree)
        assert not served.events

        other.give_back()
        assert run(tmp_path, tree | {"steps": 1}).step == 1
        assert served.lease.living(time.monotonic()) is None  # given back at the end


def test_two_addresses_of_one_server_are_refused(tmp_path: Path) -> None:
    served = ServedModel()
    with serving(served) as url:
        again = url.replace("127.0.0.1", "localhost")
        with pytest.raises(ConfigError, match=f"{url} and {again} are addresses of one server"):
            run(tmp_path, served_tree([url, again], str(tmp_path)))

    assert not served.events


def test_a_completion_that_the_context_cut_ends_the_run(tmp_path: Path) -> None:
    def cut(path: str, told: Any) -> Any:
        for choice in told.get("choices", ()):
            if len(choice["token_ids"]) == 6:
                choice["token_ids"], choice["logprobs"]["content"] = [5], choice["logprobs"]["content"][:1]
                choice["logprobs"]["content"][0]["token_id"] = 5
        return told

    with (
        serving(ServedModel(answer=cut)) as url,
        pytest.raises(RunStopped, match="cut a completion at 1 tokens where 6 were asked for"),
    ):
        run(tmp_path, served_tree([url], str(tmp_path)))


def no_inspection(path: str, told: Any) -> Any:
    """Answer as an extension that knows of no inspection."""
    is_inspection = path == "/collective_rpc" and not {"identity", "holder"} & set(told["results"][0])
    return {"results": ["no such method"]} if is_inspection else told


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        ({}, "these tensors are not what was sent: model.layers.0.mlp.up_proj.weight. Nothing was sampled"),
        (
            {"tells": frozenset()},
            "which tensor it is cannot be told: no layer there can be asked by itself. Nothing was sampled",
        ),
        (
            {"tells": frozenset({"model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"})},
            "which tensor it is cannot be told: layers that cannot be asked by themselves have "
            "model.layers.0.input_layernorm.weight, model.layers.0.mlp.down_proj.weight, "
            "model.layers.0.mlp.gate_proj.weight, model.layers.0.mlp.up_proj.weight and 7 more, and all others are",
        ),
        (
            {"answer": no_inspection},
            "which tensor it is cannot be told: our worker extension there does not say, URL answers /collective_rpc "
            'with results[0] "no such method", where an object is needed; servers that `holdfast serve` starts have',
        ),
        (
            {"lost": True},
            "which tensor it is cannot be told: our worker extension there does not say, URL answers 500 ",
        ),
    ],
)
def test_a_tensor_that_changed_behind_the_checks_is_named_or_why_it_cannot_be(
    tmp_path: Path, behaviour: dict[str, Any], words: str
) -> None:
    def garble(tensors: dict[str, Any]) -> dict[str, Any]:
        for name, value in tensors.items():
            if name.endswith("up_proj.weight"):
                value[3, 5] += 0.3
        return tensors

    served = ServedModel(garble=garble, **behaviour)
    with serving(served) as url, pytest.raises(RunStopped, match="say other log-probabilities") as error:
        run(tmp_path, served_tree([url], str(tmp_path)))

    assert words.replace("URL", url) in str(error.value)
    assert not any(what.startswith("asked") for _, what in served.events)


def test_the_transport_that_never_ran_is_refused_with_the_one_that_is_left(tmp_path: Path) -> None:
    tree = served_tree(["http://127.0.0.1:9"], str(tmp_path))
    tree["rollout"]["engine"]["transport"] = "nccl"

    with pytest.raises(ConfigError, match=r"transport: there is no such key: .*rollout\.engine\.folder"):
        run(tmp_path, tree)
