"""Fixtures of the torch backend's tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import pytest

if TYPE_CHECKING:
    from edgepipe_torch.cuda.kernels.forms import KernelForm
    from edgepipe_torch.cuda.kernels.recurrent_step import StepForm

    from tests.support.backends.host_kernels import HostModule, Part

Form = TypeVar("Form")


@pytest.fixture(scope="session")
def host_modules(tmp_path_factory: pytest.TempPathFactory) -> dict[KernelForm, HostModule]:
    """Kernels of all tested forms, compiled for the CPU."""
    from tests.support.backends.host_kernels import products_part
    from tests.support.backends.kernel_forms import FORMS

    return _compiled({form: products_part(form) for form in FORMS.values()}, tmp_path_factory)


@pytest.fixture(scope="session")
def step_modules(tmp_path_factory: pytest.TempPathFactory) -> dict[StepForm, HostModule]:
    """Step kernels of recurrent layers, compiled for the CPU."""
    from tests.support.backends.host_kernels import step_part
    from tests.support.backends.recorded_steps import STEP_FORMS

    return _compiled({form: step_part(form) for form in STEP_FORMS.values()}, tmp_path_factory)


def _compiled(parts: dict[Form, Part], folders: pytest.TempPathFactory) -> dict[Form, HostModule]:
    """Return the compiled kernels of each form. Skip the test without a compiler."""
    from tests.support.backends.host_compiler import COMPILER
    from tests.support.backends.host_kernels import compile_for_host

    if COMPILER is None:
        pytest.skip("g++ is not installed")
    modules = compile_for_host(list(parts.values()), folders.mktemp("kernels"))
    return dict(zip(parts, modules, strict=True))
