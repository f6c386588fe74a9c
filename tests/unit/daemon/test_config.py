"""Settings and where they come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgepipe.config import Timeouts, child_environment, load_config
from edgepipe.daemon.machine.data_dir import forget_name, keep_name
from edgepipe.errors import ConfigInvalid


def test_defaults_are_complete() -> None:
    loaded = load_config(environ={}, file=None)
    assert loaded.values.port == 7117
    assert loaded.values.models_dir == loaded.values.data_dir / "models"
    assert loaded.origins["port"] == "default"


def test_a_flag_beats_a_variable_beats_the_file_beats_the_default(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('port = 1000\nhttp_port = 1001\ncluster = "lab"\n')
    environ = {"EDGEPIPE_PORT": "2000", "EDGEPIPE_HTTP_PORT": "2001"}
    loaded = load_config({"port": 3000, "name": None}, environ=environ, file=file)
    assert (loaded.values.port, loaded.values.http_port, loaded.values.cluster) == (3000, 2001, "lab")
    assert loaded.origins["port"] == "flag"
    assert loaded.origins["http_port"] == "env EDGEPIPE_HTTP_PORT"
    assert loaded.origins["cluster"] == f"file {file}"
    assert loaded.origins["backend"] == "default"


@pytest.mark.parametrize(
    "environ",
    [
        {"EDGEPIPE_COLOUR": "red"},
        {"EDGEPIPE_PORT": "many"},
        {"EDGEPIPE_PORT": "70000"},
        {"EDGEPIPE_NAME": "a:b"},
        {"EDGEPIPE_NAME": ""},
        {"EDGEPIPE_PEERS": "nonsense"},
        {"EDGEPIPE_PEERS": "host:0"},
        {"EDGEPIPE_DTYPE": "int8"},
        {"EDGEPIPE_DISCOVERY": "maybe"},
        {"EDGEPIPE_LISTEN_S": "0"},
        {"EDGEPIPE_LISTEN_S": "nan"},
        {"EDGEPIPE_MEMORY_LIMIT": "lots"},
        {"EDGEPIPE_BACKEND_OPTIONS": "fast"},
    ],
)
def test_what_cannot_be_is_refused(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigInvalid):
        load_config(environ=environ)


def test_an_unknown_key_in_the_file_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("prot = 7117\n")
    with pytest.raises(ConfigInvalid, match="prot"):
        load_config(environ={}, file=file)


def test_a_named_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid):
        load_config(environ={"EDGEPIPE_CONFIG": str(tmp_path / "none.toml")})


def test_sizes_lists_and_flags_are_read() -> None:
    environ = {"EDGEPIPE_MEMORY_LIMIT": "8GB", "EDGEPIPE_PEERS": "a:1, b:2", "EDGEPIPE_DISCOVERY": "no"}
    environ["EDGEPIPE_LISTEN_S"] = "0.5"
    values = load_config(environ=environ).values
    assert values.memory_limit_bytes == 8 * 10**9
    assert values.peers == ("a:1", "b:2")
    assert not values.discovery
    assert values.listen_s == 0.5


def test_children_inherit_no_settings() -> None:
    environ = child_environment(environ={"EDGEPIPE_PORT": "1", "PATH": "/bin"}, threads=2)
    assert environ["PATH"] == "/bin"
    assert environ["OMP_NUM_THREADS"] == "2"
    assert "EDGEPIPE_PORT" not in environ


def test_children_get_larger_command_buffers_of_mlx_unless_the_user_chose() -> None:
    environ = child_environment(environ={"MLX_MAX_OPS_PER_BUFFER": "50"}, threads=0)
    assert environ["MLX_MAX_OPS_PER_BUFFER"] == "50"
    assert int(environ["MLX_MAX_MB_PER_BUFFER"]) > 50
    assert environ["MLX_ENABLE_TF32"] == "0"


def test_every_profile_notices_death_later_than_a_lost_beat() -> None:
    for timeouts in (Timeouts.loopback(), Timeouts.lan(), Timeouts.wifi()):
        assert 4 * timeouts.beat_interval_s < timeouts.dead_min_s <= timeouts.dead_max_s
        assert timeouts.redial_max_s <= 2.0


def test_a_node_keeps_the_name_of_its_last_command_until_a_setting_says_another(tmp_path: Path) -> None:
    def names(variables: dict[str, str], *, name: str | None = None) -> tuple[str, str]:
        environ = variables | {"EDGEPIPE_DATA_DIR": str(tmp_path)}
        loaded = load_config({"name": name}, environ=environ, file=_empty(tmp_path))
        return loaded.values.name, loaded.origins["name"]

    before = names({})
    keep_name(tmp_path, "studio")
    assert names({}) == ("studio", f"file {tmp_path / 'name'}")
    assert names({"EDGEPIPE_NAME": "desk"}) == ("desk", "env EDGEPIPE_NAME")
    assert names({}, name="den") == ("den", "flag")
    (tmp_path / "name").write_text("no name: it has spaces\n")
    assert names({}) == before
    keep_name(tmp_path, "studio")
    forget_name(tmp_path)
    assert names({}) == before


def _empty(folder: Path) -> Path:
    file = folder / "config.toml"
    file.touch()
    return file
