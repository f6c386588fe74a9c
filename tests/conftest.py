"""What all tests share: Hypothesis without deadlines, where the demo model is, and nodes' logs beside a failure."""

from __future__ import annotations

import gc
import hashlib
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from edgepipe.config import prepare_environment
from edgepipe.errors import EdgepipeError
from edgepipe.store.store import ModelStore, StoredModel
from edgepipe.text.conversations.known_traits import learn_traits
from edgepipe.text.conversations.traits import ModelTraits
from edgepipe.text.template import ChatTemplate
from edgepipe.text.tokenizer import check_tokenizer

# gRPC reads its settings when it is imported: links within a test's process are those of nodes.
prepare_environment()

# A shared machine is slow now and then, and that is no failure.
settings.register_profile("full", deadline=None)
settings.register_profile("short", deadline=None, max_examples=40)

# A shell's background job ignores ^C, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_CACHE = Path("~/.cache/edgepipe-tests").expanduser()
_SMALL_TOKENIZER_BYTES = 1 << 20
_LOG_LINES = 25  # log lines of each node, beside a failure


def pytest_configure(config: pytest.Config) -> None:
    """Let tests that name no number of examples try 40, or 100 where the long cases run, too."""
    settings.load_profile("short" if config.option.markexpr == "not long" else "full")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while tests are collected: that makes millions of objects, which stay.

    Later collections leave these objects out.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test's report has the ends of the logs that nodes wrote in its folder."""
    report = yield
    folder = getattr(item, "funcargs", {}).get("tmp_path")
    if report.failed and folder is not None:
        for log in sorted(folder.rglob("*.log")):
            lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
            report.sections.append((f"the end of {log.relative_to(folder)}", "\n".join(lines)))
    return report


@pytest.fixture(scope="session", autouse=True)
def metadata_read_once() -> Iterator[None]:
    """Child processes read each tokenizer and each chat template once: most tests install the same ones.

    ``unit/text/test_model_tokenizer.py`` and ``test_template_traits.py`` call what starts these processes.
    """
    digests: dict[tuple[bytes, int], str] = {}
    learned: dict[str, ModelTraits] = {}

    def check(path: Path, *, vocab_size: int) -> str:
        if path.stat().st_size > _SMALL_TOKENIZER_BYTES:
            return check_tokenizer(path, vocab_size=vocab_size)
        key = hashlib.sha256(path.read_bytes()).digest(), vocab_size
        if key not in digests:
            digests[key] = check_tokenizer(path, vocab_size=vocab_size)
        return digests[key]

    def learn(template: ChatTemplate) -> ModelTraits:
        key = repr((template.sources, template.special_tokens))
        if key not in learned:
            learned[key] = learn_traits(template)
        return learned[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edgepipe.store.install.check_tokenizer", check)
        patch.setattr("edgepipe.text.conversations.known_traits.learn_traits", learn)
        yield


@pytest.fixture(scope="session")
def models_dir() -> Path:
    """A model store that holds ``demo``: the folder that scripts/test fills, or the one in EP_TEST_MODELS."""
    folder = Path(os.environ.get("EP_TEST_MODELS") or _CACHE)
    try:
        ModelStore(folder).resolve("demo")
    except EdgepipeError as exc:
        pytest.fail(f"the demo model is missing: edgepipe models pull demo --models-dir {folder}  ({exc})")
    return folder


@pytest.fixture(scope="session")
def demo_model(models_dir: Path) -> StoredModel:
    """SmolLM2-135M-Instruct as the store keeps it."""
    return ModelStore(models_dir).resolve("demo")
