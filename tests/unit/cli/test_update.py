"""``edgepipe update``: which command fits which installation, and how a node is started again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edgepipe.cli.installation import (
    Installation,
    Installer,
    find_installation,
    remove_command,
    source_arguments,
    update_commands,
)
from edgepipe.cli.restarting import kept_flags
from edgepipe.errors import ConfigInvalid, FeatureMissing

INSTALLED = Installation(
    installer=Installer.PIP,
    place=Path("/env"),
    python=Path("/env/bin/python"),
    python_version="3.12",
    extras=("torch",),
    uv="/bin/uv",
)
PIP = "/env/bin/python -m pip install --upgrade"
UV_TOOL = "/bin/uv tool install --python 3.12 --reinstall-package edgepipe"


def commands(installed: Installation, *source: str) -> list[str]:
    return [" ".join(command) for command in update_commands(installed, source)]


@pytest.mark.parametrize(
    ("installer", "source", "expected"),
    [
        (Installer.UV, (), ["/bin/uv tool upgrade --reinstall-package edgepipe edgepipe"]),
        (Installer.UV, ("a.whl[torch]",), [f"{UV_TOOL} --torch-backend=auto a.whl[torch]"]),
        (Installer.UV, ("--no-index", "--find-links", "w", "e"), [f"{UV_TOOL} --no-index --find-links w e"]),
        (Installer.UV, ("--index-url", "u", "e"), [f"{UV_TOOL} --torch-backend=auto --index u e"]),
        (Installer.PIPX, (), ["pipx upgrade edgepipe"]),
        (Installer.PIPX, ("a.whl",), ["pipx runpip edgepipe install --upgrade a.whl"]),
        (Installer.PIP, (), [f"{PIP} edgepipe[torch]"]),
        (Installer.PIP, ("a.whl",), [f"{PIP} a.whl"]),
        (Installer.CHECKOUT, (), ["git -C /env pull --ff-only", f"{PIP} -e /env[torch]"]),
    ],
)
def test_an_update_uses_what_installed_edgepipe(
    installer: Installer, source: tuple[str, ...], expected: list[str]
) -> None:
    assert commands(replace(INSTALLED, installer=installer), *source) == expected


def test_pip_takes_the_same_source_again() -> None:
    from_git = replace(INSTALLED, source="git+https://git.example/e@main")
    assert commands(from_git) == [f"{PIP} edgepipe[torch] @ git+https://git.example/e@main"]
    with pytest.raises(ConfigInvalid, match="from a file"):
        update_commands(replace(INSTALLED, source="file:///tmp/edgepipe-1-py3-none-any.whl"))


def test_without_pip_uv_updates_the_environment() -> None:
    without = replace(INSTALLED, has_pip=False, extras=())
    packages = "--upgrade-package edgepipe --reinstall-package edgepipe"
    assert commands(without) == [f"/bin/uv pip install --python /env/bin/python {packages} edgepipe"]
    assert "uv pip uninstall" in remove_command(without)
    with pytest.raises(FeatureMissing, match="nothing on this machine"):
        update_commands(replace(without, uv=""))


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
