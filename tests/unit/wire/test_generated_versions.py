"""The generated code refuses older libraries than it was made for, so nothing older may be installed for us."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_libraries_asked_for_are_as_new_as_the_generated_code_wants() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = dict(re.findall(r"^(grpcio|protobuf)>=([\d.]+)$", "\n".join(project["dependencies"]), re.MULTILINE))
    wire = ROOT / "edgepipe" / "wire" / "v1"
    messages = (wire / "common_pb2.py").read_text(encoding="utf-8")
    services = (wire / "node_pb2_grpc.py").read_text(encoding="utf-8")
    (protobuf,) = re.findall(r"^# Protobuf Python Version: (\S+)$", messages, re.MULTILINE)
    (grpcio,) = re.findall(r"^GRPC_GENERATED_VERSION = '(\S+)'$", services, re.MULTILINE)
    assert asked == {"grpcio": grpcio, "protobuf": protobuf}
