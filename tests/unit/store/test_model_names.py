"""Names with a type: one folder for each, and what a person may leave out; types in the names of GGUF files."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgepipe.errors import ModelInvalid
from edgepipe.files.progress import PlannedFile
from edgepipe.spec.names import canonical_name, folder_name, is_name, matching_names, name_of_folder
from edgepipe.store.gguf_names import GgufChoice, choose_type, gguf_choices, main_scheme, stored_name, type_of

PART = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,12}", fullmatch=True)
NAMES = st.tuples(PART, st.none() | PART, st.none() | PART).map(
    lambda parts: parts[0] + (f"/{parts[1]}" if parts[1] else "") + (f":{parts[2]}" if parts[2] else "")
)


@given(first=NAMES, second=NAMES)
def test_each_name_has_its_own_folder(first: str, second: str) -> None:
    names = [canonical_name(name) for name in (first, second) if is_name(canonical_name(name))]
    folders = [folder_name(name) for name in names]
    assert [name_of_folder(folder) for folder in folders] == names
    assert all(not set(folder) & set("/:@") for folder in folders)
    assert len(set(folders)) == len(set(names))


@pytest.mark.parametrize(
    "name", ["", "a--b", "a/b/c", "a:b:c", "a:", ":q8_0", "a..b", "a b", "a+b", "a/b:../c", "x" * 97]
)
def test_other_texts_are_no_names(name: str) -> None:
    with pytest.raises(ModelInvalid):
        folder_name(name)


KNOWN = ["Qwen/Qwen3-8B", "org/big", "org/big:q4_k_m", "org/big:ud-q4_k_xl", "one/small:q8_0", "two/small:q8_0"]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("Qwen/Qwen3-8B", ["Qwen/Qwen3-8B"]),
        ("qwen3-8b", ["Qwen/Qwen3-8B"]),
        ("Qwen3", []),
        ("other/Qwen3-8B", []),
        ("org/big", ["org/big"]),
        ("org/big:Q4_K_M", ["org/big:q4_k_m"]),
        ("big:q4_k_xl", ["org/big:ud-q4_k_xl"]),
        ("big:Q8_0", []),
        ("small", ["one/small:q8_0", "two/small:q8_0"]),
        ("one/small", ["one/small:q8_0"]),
        ("", []),
    ],
)
def test_a_person_may_leave_out_what_is_clear(typed: str, meant: list[str]) -> None:
    assert matching_names(typed, KNOWN) == meant


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("Llama-3.3-70B-Instruct-Q4_K_M.gguf", "Q4_K_M"),
        ("Qwen3-30B-A3B-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("Model.i1-IQ3_XXS.gguf", "I1-IQ3_XXS"),
        ("qwen2.5-7b-instruct-q4_k_m-00001-of-00002.gguf", "Q4_K_M"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("model_name_q8_0.gguf", "Q8_0"),
        ("ggml-model-fp16.gguf", "F16"),
        ("Gemma-BF16.gguf", "BF16"),
        ("x-Q4_0_4_8.gguf", "Q4_0_4_8"),
        ("x-IQ4_KS_R4.gguf", "IQ4_KS_R4"),
        ("UD-Q2_K_XL/x-00001-of-00003.gguf", "UD-Q2_K_XL"),
        ("Qwen3-8B.gguf", ""),
        ("Q4_K_Mistral.gguf", ""),
        ("tiny-Q4_K_M-v2.gguf", "Q4_K_M"),
    ],
)
def test_the_type_is_a_whole_part_of_the_name(file: str, kind: str) -> None:
    assert type_of(file) == kind


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [("Q4_K_M", "Q4_K"), ("UD-Q4_K_XL", "Q4_K"), ("IQ3_M", "IQ3_S"), ("IQ4_XS", "IQ4_XS"), ("Q8_0", "Q8_0"), ("X", "")],
)
def test_most_weights_of_a_type_have_one_form(kind: str, scheme: str) -> None:
    assert main_scheme(kind) == scheme


def choices(*names: str) -> list[GgufChoice]:
    return gguf_choices(PlannedFile(name=name, num_bytes=1000 + index) for index, name in enumerate(names))


def labels(*names: str) -> list[str]:
    return [choice.label for choice in choices(*names)]


def test_what_is_no_model_is_not_offered() -> None:
    found = labels(
        *("README.md", "mmproj-x-F16.gguf", "x.imatrix.gguf", "x-Q8_0.gguf", "sub/imatrix-x.gguf", "x-F16.gguf"),
        *("mtp-x-Q8_0.gguf", "eagle3-x-Q8_0.gguf", "dflash-x-F16.gguf", "sub/dspark-x-F16.gguf"),
    )
    assert found == ["F16", "Q8_0"]
    assert labels("x-MTP-Q4_0.gguf", "mtp-x-Q8_0.gguf") == ["Q4_0"]


def test_parts_are_one_choice_with_all_their_bytes() -> None:
    (choice,) = choices("Q8_0/x-Q8_0-00002-of-00002.gguf", "Q8_0/x-Q8_0-00001-of-00002.gguf")
    assert choice.label == "Q8_0"
    assert choice.num_bytes == 2001
    assert [file.name[-21:] for file in choice.files] == ["0-00001-of-00002.gguf", "0-00002-of-00002.gguf"]


def test_a_missing_part_is_noticed() -> None:
    (choice,) = found = choices("x-Q8_0-00001-of-00003.gguf", "x-Q8_0-00003-of-00003.gguf")
    assert choice.missing == ("x-Q8_0-00002-of-00003.gguf",)
    with pytest.raises(ModelInvalid, match="lacks parts"):
        choose_type("Q8_0", found, repo="org/x")


def test_two_files_of_a_type_are_told_apart_by_name() -> None:
    assert sorted(labels("small-Q8_0.gguf", "large-Q8_0.gguf", "small-F16.gguf")) == ["F16", "large-Q8_0", "small-Q8_0"]


def test_of_a_whole_and_a_split_copy_the_whole_one_is_offered() -> None:
    (choice,) = choices("x-Q8_0.gguf", "x-Q8_0-00001-of-00002.gguf", "x-Q8_0-00002-of-00002.gguf")
    assert [file.name for file in choice.files] == ["x-Q8_0.gguf"]


UNSLOTH = ("x-Q4_K_M.gguf", "x-UD-Q4_K_M.gguf", "x-UD-Q4_K_XL.gguf", "x-F16.gguf", "x-mxfp4.gguf", "x-Q8_0.gguf")


@pytest.mark.parametrize(
    ("wanted", "label"),
    [
        ("Q4_K_M", "Q4_K_M"),
        ("ud-q4_k_m", "UD-Q4_K_M"),
        ("UD-Q4_K_XL", "UD-Q4_K_XL"),
        ("q4_k_xl", "UD-Q4_K_XL"),
        ("fp16", "F16"),
        ("MXFP4", "MXFP4"),
    ],
)
def test_a_type_is_chosen_as_a_whole(wanted: str, label: str) -> None:
    assert choose_type(wanted, choices(*UNSLOTH), repo="org/x").label == label


@pytest.mark.parametrize("wanted", ["Q4", "Q4_K", "K_M", "Q6_K", "x", ""])
def test_a_part_of_a_type_is_no_choice(wanted: str) -> None:
    with pytest.raises(ModelInvalid) as caught:
        choose_type(wanted, choices(*UNSLOTH), repo="org/x")
    assert caught.value.next_step == "edgepipe models pull org/x:Q4_K_M"


@pytest.mark.parametrize(
    ("file", "alone", "name"),
    [
        ("x-Q8_0.gguf", True, "org/x:q8_0"),
        ("x-Q8_0.gguf", False, "org/x:q8_0"),
        ("model.gguf", True, "org/x"),
        ("model.gguf", False, "org/x:model"),
    ],
)
def test_the_store_names_a_model_with_its_type(file: str, alone: bool, name: str) -> None:
    (choice,) = choices(file)
    assert stored_name("org/x", choice, alone=alone) == name
