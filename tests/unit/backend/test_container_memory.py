"""Limits of control groups, in the forms in which systems show them."""

from __future__ import annotations

import pytest

from edgepipe.backend.container_memory import GroupMemory, group_memory
from edgepipe.backend.machine_memory import machine_memory

GIB = 1 << 30
MOUNT_2 = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
MOUNT_1 = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime shared:12 - cgroup cgroup rw,memory"
OTHERS = "22 28 0:20 / /proc rw shared:5 - proc proc rw\n34 31 0:31 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"


def files(groups: str, mount: str, folders: dict[str, dict[str, object]] | None = None) -> dict[str, str]:
    """A system's files; ``folders``: files of groups, by their folders below /sys/fs/cgroup."""
    found = {"/proc/self/cgroup": groups, "/proc/self/mountinfo": f"{OTHERS}{mount}\n"}
    for folder, held in (folders or {}).items():
        found |= {f"/sys/fs/cgroup{folder}/{name}": f"{value}\n" for name, value in held.items()}
    return found


def memory_of(system: dict[str, str]) -> GroupMemory | None:
    def read(path: str) -> str:
        if path not in system:
            raise FileNotFoundError(path)
        return system[path]

    return group_memory(read, machine_bytes=16 * GIB)


def second(limit: object, used: int, *, stat: str = "anon 5\ninactive_file 0") -> dict[str, object]:
    return {"memory.max": limit, "memory.current": used, "memory.stat": stat}


def first(limit: int, used: int, stat: str = "") -> dict[str, object]:
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.stat": stat}


def test_a_container_s_own_group_is_at_the_mount() -> None:
    system = files("0::/\n", MOUNT_2.format(root="/"), {"": second(8 * GIB, 3 * GIB)})
    assert memory_of(system) == (5 * GIB, 8 * GIB)


def test_pages_of_files_are_freed_before_the_kernel_kills() -> None:
    stat = f"anon {2 * GIB}\nfile {3 * GIB}\ninactive_file {GIB}\nactive_file {GIB}\nslab_reclaimable 100\nshmem {GIB}"
    system = files("0::/\n", MOUNT_2.format(root="/"), {"": second(8 * GIB, 6 * GIB, stat=stat)})
    assert memory_of(system) == (4 * GIB + 100, 8 * GIB)


def test_a_group_above_may_have_the_lower_limit_and_another_the_less_room() -> None:
    system = files(
        "0::/user.slice/a.service\n",
        MOUNT_2.format(root="/"),
        {"/user.slice/a.service": second(8 * GIB, 7 * GIB), "/user.slice": second(6 * GIB, 2 * GIB)},
    )
    assert memory_of(system) == (GIB, 6 * GIB)


def test_a_group_that_is_slowed_down_earlier_has_no_more_than_that() -> None:
    limits = second("max", GIB) | {"memory.high": 2 * GIB}
    assert memory_of(files("0::/\n", MOUNT_2.format(root="/"), {"": limits})) == (GIB, 2 * GIB)


@pytest.mark.parametrize("groups", ["0::/docker/abc/sub", "0::/../../elsewhere", "0::/other"])
def test_of_a_path_that_the_mount_does_not_show_the_mount_counts(groups: str) -> None:
    """A container may see the path that its group has outside."""
    mount = MOUNT_2.format(root="/docker/abc")
    system = files(groups, mount, {"": second(4 * GIB, GIB), "/sub": second("max", 0)})
    assert memory_of(system) == (3 * GIB, 4 * GIB)


def test_the_first_version_counts_groups_below() -> None:
    stat = f"cache 5\ninactive_file 7\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}"
    groups = "5:devices:/\n4:cpu,memory:/docker/abc\n0::/\n"
    system = files(groups, MOUNT_1.format(root="/docker/abc"), {"/memory": first(4 * GIB, 3 * GIB, stat)})
    assert memory_of(system) == (3 * GIB, 4 * GIB)
    assert memory_of(
        files(groups, MOUNT_1.format(root="/"), {"/memory/docker/abc": first(4 * GIB, 4 * GIB, stat)})
    ) == (
        2 * GIB,
        4 * GIB,
    )


def test_both_versions_at_once() -> None:
    """The second one has no memory controller then."""
    mounts = f"{MOUNT_1.format(root='/')}\n38 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
    system = files(
        "4:memory:/a\n0::/\n", mounts, {"/memory/a": first(4 * GIB, GIB), "/memory": first(2**63 - 4096, GIB)}
    )
    assert memory_of(system) == (3 * GIB, 4 * GIB)


def test_a_group_that_uses_more_than_its_limit_has_nothing_left() -> None:
    assert memory_of(files("0::/\n", MOUNT_2.format(root="/"), {"": second(GIB, 2 * GIB)})) == (0, GIB)


@pytest.mark.parametrize(
    "system",
    [
        {},
        files("0::/\n", ""),
        files("", MOUNT_2.format(root="/"), {"": second(GIB, 5)}),
        files("0::/\n", MOUNT_2.format(root="/")),
        files("0::/\n", MOUNT_2.format(root="/"), {"": second("max", 5)}),
        files("0::/\n", MOUNT_2.format(root="/"), {"": second("many", 5)}),
        files("0::/\n", MOUNT_2.format(root="/"), {"": second(16 * GIB, 5)}),
        files("0::/\n", MOUNT_2.format(root="/"), {"": {"memory.max": 5}}),
        files("5:devices:/\n", MOUNT_1.format(root="/"), {"/memory": first(GIB, 5)}),
    ],
)
def test_without_a_limit_that_can_be_read_there_is_none(system: dict[str, str]) -> None:
    assert memory_of(system) is None


def test_a_folder_with_a_space_in_its_name() -> None:
    system = files("0::/\n", "30 23 0:26 / /my\\040groups rw - cgroup2 cgroup2 rw")
    system |= {"/my groups/memory.max": "100", "/my groups/memory.current": "30", "/my groups/memory.stat": ""}
    assert memory_of(system) == (70, 100)


def test_this_machine_has_memory() -> None:
    found = machine_memory()
    assert 0 < found.available_bytes <= found.total_bytes
