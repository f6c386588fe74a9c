"""``edgepipe update``: which command fits which installation, and how a node is started again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgepipe.cli.installation import (
    RELEASED,
    Installation,
    Installer,
    extra_commands,
    find_installation,
    remove_command,
    source_arguments,
    update_commands,
)
from edgepipe.cli.restarting import kept_flags
from edgepipe.errors import ConfigInvalid, FeatureMissing
from tests.support.processes.wheels import ROOT

INSTALLED = Installation(
    installer=Installer.PIP,
    place=Path("/env"),
    python=Path("/env/bin/python"),
    python_version="3.12",
    extras=("torch",),
    uv="/bin/uv",
)
PIP = "/env/bin/python -m pip install"
PIPX = "pipx runpip edgepipe install"
UV_TOOL = "/bin/uv tool install --python 3.12 --upgrade-package edgepipe --reinstall-package edgepipe"
FOLDER = ("--no-index", "--find-links", "file:///w")


def commands(installed: Installation, *source: str, released: bool = True) -> list[str]:
    return [" ".join(command) for command in update_commands(installed, source, released=released)]


def both(pip: str, source: str) -> list[str]:
    """What it needs, then edgepipe itself."""
    return [f"{pip} --upgrade {source}", f"{pip} --force-reinstall --no-deps {source}"]


@pytest.mark.parametrize(
    ("installer", "source", "expected"),
    [
        (Installer.UV, (), [f"{UV_TOOL} --torch-backend=auto edgepipe[torch]"]),
        (Installer.UV, ("a.whl[torch]",), [f"{UV_TOOL} --torch-backend=auto a.whl[torch]"]),
        (Installer.UV, ("--no-index", "--find-links", "w", "e"), [f"{UV_TOOL} --no-index --find-links w e"]),
        (Installer.UV, ("--index-url", "u", "e"), [f"{UV_TOOL} --torch-backend=auto --index u e"]),
        (Installer.PIPX, (), ["pipx upgrade edgepipe"]),
        (Installer.PIPX, ("a.whl",), both(PIPX, "a.whl")),
        (Installer.PIP, (), both(PIP, "edgepipe[torch]")),
        (Installer.PIP, ("a.whl",), both(PIP, "a.whl")),
    ],
)
def test_an_update_uses_what_installed_edgepipe(
    installer: Installer, source: tuple[str, ...], expected: list[str]
) -> None:
    assert commands(replace(INSTALLED, installer=installer), *source) == expected


def test_an_update_takes_the_same_source_again() -> None:
    main = "git+https://git.example/e@main"
    again = f"edgepipe[torch] @ {main}"
    from_git = replace(INSTALLED, source=main)
    assert commands(from_git, released=False) == both(PIP, again)
    assert commands(replace(from_git, installer=Installer.PIPX), released=False) == both(PIPX, again)
    assert commands(replace(from_git, installer=Installer.UV)) == [f"{UV_TOOL} --torch-backend=auto {again}"]
    remembered = replace(INSTALLED, installer=Installer.UV, index=FOLDER)
    assert commands(remembered, released=False) == [f"{UV_TOOL} {' '.join(FOLDER)} edgepipe[torch]"]


@pytest.mark.parametrize("installer", [Installer.UV, Installer.PIPX, Installer.PIP, Installer.CHECKOUT])
def test_a_clone_is_pulled_before_edgepipe_is_built_from_it(installer: Installer) -> None:
    clone = Path("/clone")
    built = replace(INSTALLED, installer=installer, source="file:///clone", checkout=clone, has_git=True)
    if installer is Installer.CHECKOUT:
        built = replace(built, place=clone)
    first, second = commands(built, released=False)
    assert first == "git -C /clone pull --ff-only"
    assert "/clone" in second
    unpacked = replace(built, has_git=False)  # an archive, not a clone
    assert commands(unpacked, released=False)[0] == second


@pytest.mark.parametrize("installer", [Installer.UV, Installer.PIPX, Installer.PIP])
@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"source": "file:///tmp/edgepipe-1-py3-none-any.whl"}, "from the file"),
        ({"source": "file:///clone", "checkout": Path("/clone"), "checkout_exists": False}, "/clone, which is gone"),
        ({}, "has no release yet"),
    ],
)
def test_without_a_place_for_newer_versions_a_person_names_one(
    installer: Installer, changes: dict[str, Any], fact: str
) -> None:
    installed = replace(INSTALLED, installer=installer, **changes)
    with pytest.raises(ConfigInvalid) as caught:
        update_commands(installed, released=False)
    assert fact in caught.value.fact
    assert "--from WHERE" in caught.value.next_step
    assert update_commands(installed, ["a.whl"], released=False)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"installer": Installer.PIP}, "/env/bin/python -m pip install matplotlib>=3.9"),
        ({"installer": Installer.PIPX}, f"{PIPX} matplotlib>=3.9"),
        ({"installer": Installer.CHECKOUT}, "/env/bin/python -m pip install matplotlib>=3.9"),
        ({"has_pip": False}, "/bin/uv pip install --python /env/bin/python matplotlib>=3.9"),
        (
            {"installer": Installer.UV, "source": "file:///e-1.whl"},
            f"{UV_TOOL} --torch-backend=auto edgepipe[torch,plot] @ file:///e-1.whl",
        ),
        ({"installer": Installer.UV, "index": FOLDER}, f"{UV_TOOL} {' '.join(FOLDER)} edgepipe[torch,plot]"),
    ],
)
def test_an_extra_is_added_to_the_version_that_is_installed(changes: dict[str, Any], expected: str) -> None:
    installed = replace(INSTALLED, needs={"plot": ["matplotlib>=3.9"]}, **changes)
    assert [" ".join(each) for each in extra_commands(installed, ["plot"])] == [expected]


def test_an_extra_needs_what_the_metadata_say() -> None:
    needs = find_installation().needs
    assert {need.partition(">")[0] for need in needs["torch"]} == {"torch", "llvmlite"}
    assert all("sys_platform" in need.partition(";")[2] for need in needs["mlx"])
    assert not any("extra" in need for own in needs.values() for need in own)


def test_uv_adds_no_extra_from_a_place_that_it_does_not_know() -> None:
    with pytest.raises(ConfigInvalid, match="where newer versions are"):
        extra_commands(replace(INSTALLED, installer=Installer.UV), ["plot"], released=False)


def test_updates_and_the_script_agree_whether_there_is_a_release() -> None:
    assert f"RELEASED={'yes' if RELEASED else 'no'} #" in (ROOT / "scripts" / "install.sh").read_text()


def test_without_pip_uv_updates_the_environment() -> None:
    without = replace(INSTALLED, has_pip=False, extras=())
    packages = "--upgrade-package edgepipe --reinstall-package edgepipe"
    assert commands(without) == [f"/bin/uv pip install --python /env/bin/python {packages} edgepipe"]
    assert "uv pip uninstall" in remove_command(without)
    with pytest.raises(FeatureMissing, match="nothing on this machine"):
        commands(replace(without, uv=""))
    with pytest.raises(FeatureMissing, match="uv installed edgepipe"):
        commands(replace(without, installer=Installer.UV, uv=""))


def test_a_checkout_takes_no_other_source() -> None:
    with pytest.raises(ConfigInvalid, match="runs from the checkout") as caught:
        update_commands(replace(INSTALLED, installer=Installer.CHECKOUT), ["a.whl"])
    assert "edgepipe update" in caught.value.next_step


def test_sources_are_wheels_folders_checkouts_repositories_and_indexes(tmp_path: Path) -> None:
    wheel = tmp_path / "wheels here" / "edgepipe-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    wheel.touch()
    checkout = tmp_path / "checkout"
    (checkout / "edgepipe").mkdir(parents=True)
    (checkout / "edgepipe" / "__init__.py").touch()
    assert source_arguments(str(wheel), ["mlx"]) == [f"{wheel}[mlx]"]
    assert source_arguments(str(wheel.parent), []) == ["--no-index", "--find-links", str(wheel.parent), "edgepipe"]
    assert source_arguments(str(checkout), []) == [str(checkout)]
    assert source_arguments("git+ssh://g/e", ["torch"]) == ["edgepipe[torch] @ git+ssh://g/e"]
    assert source_arguments("https://i/simple", []) == ["--index-url", "https://i/simple", "edgepipe"]
    with pytest.raises(ConfigInvalid, match="holds no edgepipe"):
        source_arguments(str(tmp_path), [])


def test_this_installation_is_found_with_its_own_remove_command() -> None:
    found = find_installation()
    assert found.place.is_dir()
    assert remove_command(found).endswith("edgepipe")
    assert update_commands(found)


def test_a_node_is_started_again_with_its_flags() -> None:
    flags = ["--name", "a", "--data-dir", "x", "--data-dir=y", "--background", "--json", "--backend-option", "k=v"]
    assert kept_flags([*flags, "--quiet-when-ready"]) == ("--name", "a", "--backend-option", "k=v")
