"""Names of models as people type them: what is fetched, what is planned, and which model that is there is meant."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.errors import ConfigInvalid, ModelUnknown
from edgepipe.shapes.loader import shape_names
from edgepipe.store.further_names import MAX_NAMES, allowed_names, checked_names
from edgepipe.store.known_models import DEMO, key_of, known_models
from edgepipe.store.pull import hub_source
from edgepipe.store.typed_names import meant_names, nearest, planned_name, understand, understood
from edgepipe.weights.mixes import named_model, split_mix, stand_in

LINES = (Path(__file__).parents[2] / "data" / "typed_names.txt").read_text(encoding="utf-8").splitlines()
TYPED = [tuple(part.strip() for part in line.split(" | ")) for line in LINES if not line.startswith("#")]


@pytest.mark.parametrize(("typed", "pulled", "planned"), TYPED)
def test_a_name_as_typed_means_what_the_table_says(typed: str, pulled: str, planned: str) -> None:
    meant = understand(typed)
    assert (meant.source, meant.planned) == (pulled, planned)
    assert planned_name(typed) == planned
    assert understood(typed.upper() if "/" not in typed else typed) == meant
    source = hub_source(typed)
    assert (DEMO if source is None else source.repo) == meant.repository
    assert split_mix(planned)[0] in shape_names()


def test_the_list_has_sixty_names() -> None:
    assert len({typed for typed, _, _ in TYPED}) >= 60


def test_every_known_shape_can_be_pulled_by_its_name_and_each_name_means_one_model() -> None:
    models = known_models()
    assert {model.name for model in models} == set(shape_names())
    keys = [key_of(name) for model in models for name in (model.name, *model.also)]
    assert len(set(keys)) == len(keys)
    for model in models:
        assert understand(model.typed).known is model, f"plan prints '{model.typed}', and a pull must take it"
        assert understand(model.title.partition(",")[0]).known is model
        assert stand_in(model.type) or model.type.lower() == split_mix(model.typed)[1]


@pytest.mark.parametrize(
    ("typed", "near"),
    [
        ("lama 3.3 70b", "llama-3.3-70b"),
        ("qwen3.6-32b", "qwen3.6-35b-a3b"),
        ("gemini4", "gemma-4-26b-a4b"),
        ("gptoss-12b", "gpt-oss-120b"),
        ("", ""),
        ("???", ""),
    ],
)
def test_other_names_are_refused_with_the_nearest_three(typed: str, near: str) -> None:
    with pytest.raises(ModelUnknown) as caught:
        understand(typed)
    assert len(nearest(typed)) == 3
    assert all(name in caught.value.fact for name in nearest(typed))
    assert near in nearest(typed) or not near
    assert nearest(typed)[0] in caught.value.next_step


@pytest.mark.parametrize(
    ("typed", "what"),
    [
        ("https://huggingface.co/datasets/org/data", "is no model"),
        ("https://huggingface.co/spaces/org/app", "is no model"),
        ("https://example.org/model.gguf", "is not on the Hugging Face Hub"),
        ("https://huggingface.co/org", "no model is called"),
        ("org/na me", "no model is called"),
        ("org/name:Q4 K", "no model is called"),
        ("../org/name", "no model is called"),
        ("org/a..b", "no model is called"),
        ("qwen3:8b:9b", "no model is called"),
        ("x" * 10_000, "no model is called"),
        ("qwen3\x008b\n" * 50, "no model is called"),
    ],
)
def test_what_is_no_name_is_refused_and_never_fetched(typed: str, what: str) -> None:
    with pytest.raises(ModelUnknown, match=what) as caught:
        understand(typed)
    assert len(str(caught.value)) < 600
    assert understood(typed) is None


@given(st.text(max_size=60) | st.from_regex(r"[a-z0-9.:/_ -]{0,80}", fullmatch=True))
def test_any_text_is_understood_or_refused(text: str) -> None:
    meant = understood(text)
    if meant is None:
        with pytest.raises(ModelUnknown):
            understand(text)
    else:
        assert understand(meant.source).repository == meant.repository
    assert meant_names(text, ["demo", "Qwen/Qwen3-8B-GGUF:q4_k_m"]) in ([], ["demo"], ["Qwen/Qwen3-8B-GGUF:q4_k_m"])


def test_a_file_s_page_means_that_file_also_among_several_of_a_type() -> None:
    source = hub_source("https://huggingface.co/org/x/blob/main/sub/large-Q8_0.gguf")
    assert source is not None
    assert (source.repo, source.type, source.file) == ("org/x", "Q8_0", "sub/large-Q8_0.gguf")


def test_types_without_a_published_rule_are_planned_with_the_sizes_of_a_near_one() -> None:
    assert named_model("qwen3-8b:ud-q4_k_xl") == named_model("qwen3-8b:q4_k_m")
    assert [stand_in(kind) for kind in ("UD-Q4_K_XL", "iq4_xs", "q4_k_m", "q9")] == ["q4_k_m", "q4_0", "", ""]


THERE = [
    *("demo", "Qwen/Qwen3-8B-GGUF:q4_k_m", "bartowski/Qwen3-8B-GGUF:q8_0", "unsloth/Qwen3.6-35B-A3B-GGUF:ud-q4_k_m"),
    *("Llama-3.3-70B-Instruct-Q4_K_M", "org/home"),
]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("demo:latest", ["demo"]),
        ("DEMO", ["demo"]),
        ("smollm2:135m", ["demo"]),
        ("qwen3:8b", ["Qwen/Qwen3-8B-GGUF:q4_k_m"]),
        ("qwen3:8b-q8_0", ["bartowski/Qwen3-8B-GGUF:q8_0"]),
        ("qwen3.6", ["unsloth/Qwen3.6-35B-A3B-GGUF:ud-q4_k_m"]),
        ("hf.co/unsloth/Qwen3.6-35B-A3B-GGUF:latest", ["unsloth/Qwen3.6-35B-A3B-GGUF:ud-q4_k_m"]),
        ("https://huggingface.co/bartowski/Qwen3-8B-GGUF", ["bartowski/Qwen3-8B-GGUF:q8_0"]),
        ("Llama 3.3 70B", ["Llama-3.3-70B-Instruct-Q4_K_M"]),
        ("llama3.3:70b-q8_0", []),
        ("home:latest", ["org/home"]),
        ("gemma4", []),
        ("gpt-9", []),
    ],
)
def test_a_name_as_typed_finds_the_model_that_is_there(typed: str, meant: list[str]) -> None:
    assert meant_names(typed, THERE) == meant


@pytest.mark.parametrize("name", ["a/b", "qwen3:8b", "Qwen3 8B", "demo", "demo:latest", "", "-x", "x" * 65, "gemma4"])
def test_a_further_name_hides_no_model(name: str) -> None:
    with pytest.raises(ConfigInvalid, match="cannot be a further name"):
        checked_names([name])
    assert allowed_names([name, "home"]) == ("home",)


def test_further_names_are_few_and_each_counts_once() -> None:
    assert checked_names(["home", "gpt-4o:latest", "home"]) == ("home", "gpt-4o")
    many = [f"n{index}" for index in range(MAX_NAMES + 1)]
    with pytest.raises(ConfigInvalid, match="at most 8"):
        checked_names(many)
    assert len(allowed_names(many)) == MAX_NAMES


@pytest.mark.parametrize("name", ["gemma4:e2b", "Gemma 4 E4B it", "gemma4-e4b:q4_k_m"])
def test_a_model_whose_form_is_not_served_is_no_spelling_mistake(name: str) -> None:
    for read in (understand, planned_name):
        with pytest.raises(ModelUnknown) as refused:
            read(name)
        assert refused.value.what == f"edgepipe does not serve '{name}'"
        assert "per-layer embeddings" in refused.value.fact
    assert understood(name) is None
